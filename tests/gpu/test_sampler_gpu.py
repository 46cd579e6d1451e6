"""The sampler in CUDA graphs: captured once over static buffers, replayed for other batches, never waiting."""

from __future__ import annotations

import pytest
import torch

from runner.messages import EMBEDDING_ID, SamplingParams
from runner.sampler import Asks, LogitEdits, Logprobs, SamplingState, logprobs_of, pack, sample
from runner.slots import SlotState

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CPU = torch.device("cpu")
SLOTS, VOCAB, PADDED = 12, 5003, 8
REQUESTS = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.95},
    {"temperature": 0.7, "min_p": 0.02},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.2, "top_k": 400},
]


def make_state() -> tuple[SlotState, SamplingState]:
    """Slot i has request i modulo their number, on the CPU."""
    slots, sampling = SlotState.allocate(SLOTS, 64, 16, CPU), SamplingState.allocate(SLOTS, CPU)
    slots.token_ids.random_(0, 50)
    slots.token_ids[:, ::5] = EMBEDDING_ID
    slots.length.random_(20, 64)
    slots.prompt_len.fill_(15)
    for index in range(SLOTS):
        params = SamplingParams(**{"max_tokens": 9, "seed": index, **REQUESTS[index % len(REQUESTS)]})  # type: ignore[arg-type]
        packed = torch.from_numpy(pack(params, index % 3))
        floats = len(sampling.floats)
        sampling.floats[:, index], sampling.ints[:, index] = packed[:floats].view(torch.float32), packed[floats:]
    return slots, sampling


def to_cuda(slots: SlotState, sampling: SamplingState) -> tuple[SlotState, SamplingState]:
    fields = (getattr(slots, name).cuda() for name in SlotState.__dataclass_fields__)
    return SlotState(*fields), SamplingState(sampling.floats.cuda(), sampling.ints.cuda())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("asks", [Asks(), Asks(filters=True), Asks(penalties=True), Asks(True, True)], ids=repr)
def test_a_captured_choice_serves_any_batch(asks: Asks, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    slots, sampling = make_state()
    cuda_slots, cuda_sampling = to_cuda(slots, sampling)
    logits = torch.zeros(PADDED, VOCAB, dtype=dtype, device="cuda")
    slot = torch.zeros(PADDED, dtype=torch.int32, device="cuda")
    out = torch.zeros(SLOTS, dtype=torch.int64, device="cuda")

    def run() -> None:
        sample(logits, slot, cuda_slots, cuda_sampling, asks, None, out)

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for entries in (PADDED, 3, 1, PADDED):
        chosen = torch.randperm(SLOTS)[:entries].int()
        values = (torch.randn(entries, VOCAB) * 3).to(dtype)
        # What a smaller batch leaves of the larger one before stays as it is.
        logits[:entries], slot[:entries] = values.cuda(), chosen.cuda()
        slot[entries:] = 0
        graph.replay()
        expected = sample(values.clone(), chosen, slots, sampling, asks, None)
        assert out[:entries].tolist() == expected.tolist()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_waits_for_the_device(dtype: torch.dtype) -> None:
    slots, sampling = to_cuda(*make_state())
    logits = torch.randn(PADDED, VOCAB, device="cuda").to(dtype)
    slot = torch.arange(PADDED, dtype=torch.int32, device="cuda")
    edits = LogitEdits(torch.tensor([3, VOCAB + 7]).cuda(), torch.tensor([1.5, -torch.inf]).cuda())
    torch.cuda.set_sync_debug_mode("error")
    try:
        tokens = sample(logits, slot, slots, sampling, Asks(True, True), edits)
        logprobs_of(logits, tokens, 5)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_captured_logprobs() -> None:
    torch.manual_seed(1)
    logits = torch.zeros(4, VOCAB, dtype=torch.bfloat16, device="cuda")
    tokens = torch.zeros(4, dtype=torch.int64, device="cuda")
    logprobs_of(logits, tokens, 5)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = logprobs_of(logits, tokens, 5)
    logits.copy_(torch.randn(4, VOCAB) * 3)
    tokens.copy_(torch.tensor([0, 5002, 77, 9]))
    graph.replay()
    expected = logprobs_of(logits.cpu(), tokens.cpu(), 5)
    for name in Logprobs.__dataclass_fields__:
        torch.testing.assert_close(getattr(result, name).cpu(), getattr(expected, name), rtol=1e-5, atol=1e-5)
