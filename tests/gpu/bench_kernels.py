"""Times each kernel against the least time that its bytes and operations need. Prints a JSON line a case.

    python -m tests.gpu.bench_kernels                    every case
    python -m tests.gpu.bench_kernels --only decode      cases whose name begins so
    python -m tests.gpu.bench_kernels --sweep            attention under other tiles instead, the best five, best last

A case is captured in one CUDA graph over as many copies of its data as it takes to overflow the L2 cache (a model's
layers do the same), so that neither the launches nor the cache flatter it. `us` is the median per call.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from runner.attention.backend import AttentionBatch
from runner.attention.triton_attention import TritonAttention
from runner.attention.triton_tiles import Tiles
from runner.kernels.activation_triton import gated_triton
from runner.kernels.cache_write_triton import write_kv_triton
from runner.kernels.embed_triton import gather_rows_triton
from runner.kernels.filters_triton import filter_floors_triton
from runner.kernels.gumbel_triton import gumbel_argmax_triton
from runner.kernels.logprobs_triton import logprobs_of_triton
from runner.kernels.penalties_triton import apply_penalties_triton
from runner.kernels.prepare import SLOTS, STARTS
from runner.kernels.prepare_triton import advance_slots_triton, prepare_inputs_triton
from runner.kernels.rms_norm_triton import add_rms_norm_triton
from runner.kernels.rope import RopeTable
from runner.kernels.rope_triton import rope_and_write_triton
from runner.sampling_state import SamplingState
from runner.slots import SlotState, StepInputs

BYTES_PER_SECOND = 4.3e12
FLOP_PER_SECOND = 790e12
"""What one H200 was measured to do: a device copy, and an 8192³ bf16 product of random data."""

L2_OVERFLOW = 256 << 20
CUDA = torch.device("cuda")
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Case:
    name: str
    shape: dict[str, Any]
    bytes: int
    flops: int
    make: Callable[[], Callable[[], object]]
    """A fresh copy of the case's data, as a function that runs the kernel on it."""
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def floor_us(self) -> float:
        return 1e6 * max(self.bytes / BYTES_PER_SECOND, self.flops / FLOP_PER_SECOND)

    def measure(self) -> float:
        """Median microseconds a call."""
        copies = min(64, max(1, math.ceil(L2_OVERFLOW / max(self.bytes, 1))))
        calls = [self.make() for _ in range(copies)]
        for call in calls:
            call()  # compiles, outside the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        times: list[float] = []
        for _ in range(30):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return 1e3 * statistics.median(times[5:]) / copies

    def report(self) -> float:
        us = self.measure()
        line = {"case": self.name, **self.shape, **self.notes, "us": round(us, 2), "floor_us": round(self.floor_us, 2)}
        line |= {"of_floor": round(self.floor_us / us, 3), "tb_s": round(self.bytes / us / 1e6, 2)}
        if self.flops > self.bytes:
            line["tflop_s"] = round(self.flops / us / 1e6, 1)
        print(json.dumps(line), flush=True)
        return us


@dataclass(frozen=True)
class Shape:
    """One attention layer."""

    model: str
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None


LLAMA = Shape("Llama-3.1-8B", 32, 8, 128)
QWEN = Shape("Qwen3-0.6B", 16, 8, 128)
GEMMA = Shape("Gemma-3-4B", 8, 4, 256, window=1024)


def attention_batch(rows: list[int], before: list[int], shape: Shape, max_seq_len: int) -> AttentionBatch:
    """Entries of so many rows after so many cached ones, in blocks scattered over the cache."""
    lengths = [a + b for a, b in zip(rows, before, strict=True)]
    blocks_per_seq = -(-max_seq_len // shape.block_size)
    used = [-(-length // shape.block_size) for length in lengths]
    table = torch.zeros(len(rows), blocks_per_seq, dtype=torch.int32)
    scattered = 1 + torch.randperm(sum(used)).int()
    for i, count in enumerate(used):
        table[i, :count], scattered = scattered[:count], scattered[count:]
    cache_shape = (sum(used) + 1, shape.block_size, shape.kv_heads, shape.head_dim)
    starts = [sum(rows[:i]) for i in range(len(rows) + 1)]

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=CUDA)

    positions = torch.cat([torch.arange(b, b + a) for a, b in zip(rows, before, strict=True)]).to(CUDA)
    return AttentionBatch(
        backend=TritonAttention(),
        key_caches=[torch.randn(cache_shape, device=CUDA, dtype=BF16)],
        value_caches=[torch.randn(cache_shape, device=CUDA, dtype=BF16)],
        block_table=table.to(CUDA),
        entry_slots=ints([*range(len(rows)), 0]),
        entry_starts=ints(starts),
        seq_lens=ints(lengths),
        positions=positions,
        cache_index=positions,
        num_entries=len(rows),
        num_decodes=sum(count == 1 for count in rows),
        max_seq_len=max_seq_len,
        host_starts=starts,
        host_seq_lens=lengths,
    )


def attention_call(
    shape: Shape, rows: list[int], before: list[int], max_seq_len: int, tiles: dict[str, Tiles]
) -> Callable[[], object]:
    batch = attention_batch(rows, before, shape, max_seq_len)
    query = torch.randn(sum(rows), shape.heads, shape.head_dim, device=CUDA, dtype=BF16)
    backend = TritonAttention(**tiles)
    options: dict[str, Any] = {"scale": shape.head_dim**-0.5, "window": shape.window, "softcap": shape.softcap}
    return lambda: backend.attend(query, batch.key_caches[0], batch.value_caches[0], batch, **options)


def attention_case(name: str, shape: Shape, rows: list[int], before: list[int], max_seq_len: int, **notes: Any) -> Case:
    row_bytes = 2 * shape.kv_heads * shape.head_dim * 2
    reach = [min(a + b, (shape.window or a + b) + a - 1) for a, b in zip(rows, before, strict=True)]
    query_bytes = 2 * sum(rows) * shape.heads * shape.head_dim * 2
    pairs = sum(
        sum(min(b + i + 1, shape.window or b + i + 1) for i in range(a)) for a, b in zip(rows, before, strict=True)
    )
    what = {"model": shape.model, "rows": sum(rows), "entries": len(rows), "max_seq_len": max_seq_len}
    return Case(
        name,
        what,
        bytes=sum(reach) * row_bytes + query_bytes,
        flops=4 * shape.heads * shape.head_dim * pairs,
        make=lambda: attention_call(shape, rows, before, max_seq_len, {}),
        notes=notes,
    )


def decode_cases() -> Iterator[Case]:
    for shape, batches in ((LLAMA, (1, 32, 256)), (QWEN, (1, 64, 256)), (GEMMA, (1, 32))):
        for batch in batches:
            yield attention_case("decode", shape, [1] * batch, [1023] * batch, 1024, context=1024)
    # The same as a graph captured for a longest context of 32k runs it.
    yield attention_case("decode", LLAMA, [1] * 32, [1023] * 32, 32_768, context=1024)
    yield attention_case("decode", LLAMA, [1] * 256, [1023] * 256, 32_768, context=1024)
    yield attention_case("decode", QWEN, [1], [1023], 32_768, context=1024)
    # One long sequence among short ones, and alone.
    yield attention_case("decode", LLAMA, [1] * 256, [32_767] + [511] * 255, 32_768, context="32k + 255 of 512")
    yield attention_case("decode", LLAMA, [1], [32_767], 32_768, context=32_768)


def prefill_cases() -> Iterator[Case]:
    for shape in (LLAMA, QWEN, GEMMA):
        for rows in (2048, 8192):
            yield attention_case("prefill", shape, [rows], [0], rows)
    yield attention_case("prefill", LLAMA, [512] * 16, [0] * 16, 8192)
    yield attention_case("prefill", LLAMA, [2048], [6144], 8192)
    mixed = [1] * 32 + [2016]
    yield attention_case("mixed", LLAMA, mixed, [1023] * 32 + [0], 8192)


def sdpa_cases() -> Iterator[Case]:
    """torch's own, over contiguous keys: what a prefill may be held against."""
    for shape in (LLAMA, QWEN):
        for rows in (2048, 8192):

            def make(shape: Shape = shape, rows: int = rows) -> Callable[[], object]:
                query = torch.randn(1, shape.heads, rows, shape.head_dim, device=CUDA, dtype=BF16)
                key, value = torch.randn(2, 1, shape.kv_heads, rows, shape.head_dim, device=CUDA, dtype=BF16)
                return lambda: scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

            ours = attention_case("sdpa", shape, [rows], [0], rows)
            yield replace(ours, make=make)


def gather_cases() -> Iterator[Case]:
    for rows, hidden, vocab in ((1, 1024, 151_936), (256, 1024, 151_936), (256, 4096, 128_256), (8192, 4096, 128_256)):
        table = torch.randn(vocab, hidden, device=CUDA, dtype=BF16)
        for embeddings in (0.0, 0.5):

            def make(rows: int = rows, table: Tensor = table, embeddings: float = embeddings) -> Callable[[], object]:
                vocab, hidden = table.shape
                ids = torch.randint(0, vocab, (rows,), device=CUDA, dtype=torch.int32)
                is_token = torch.rand(rows, device=CUDA) >= embeddings
                client_rows = torch.randn(rows, hidden, device=CUDA, dtype=BF16)
                out = torch.empty(rows, hidden, device=CUDA, dtype=BF16)
                return lambda: gather_rows_triton(ids, is_token, client_rows, table, out)

            shape = {"rows": rows, "hidden": hidden, "embeddings": embeddings}
            yield Case("gather_rows", shape, bytes=2 * rows * hidden * 2, flops=0, make=make)


VOCAB = 151_936


def peaked_logits(rows: int, dtype: torch.dtype) -> Tensor:
    """Like a model's: nearly all of the probability is on a few dozen tokens."""
    logits = torch.randn(rows, VOCAB, device=CUDA) * 2
    logits[:, :40] += 12
    return logits[:, torch.randperm(VOCAB, device=CUDA)].to(dtype)


def sampling_state(rows: int, **asks: float) -> SamplingState:
    state = SamplingState.allocate(rows, CUDA)
    names = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
    neutral = {"temperature": 1.0, "top_p": 1.0, "repetition": 1.0}
    for i, name in enumerate(names):
        state.floats[i] = asks.get(name, neutral.get(name, 0.0))
    state.ints.random_(-(2**31), 2**31 - 1)
    state.ints[0] = int(asks.get("top_k", 0))
    return state


def slot_of(rows: int) -> Tensor:
    return torch.randperm(rows, device=CUDA).int()


def gumbel_cases() -> Iterator[Case]:
    for dtype in (BF16, torch.float32):
        for rows in (1, 64, 256):
            for temperature in (0.0, 1.0):

                def make(
                    rows: int = rows, temperature: float = temperature, dtype: torch.dtype = dtype
                ) -> Callable[[], object]:
                    logits, state = peaked_logits(rows, dtype), sampling_state(rows, temperature=temperature)
                    slot, length = slot_of(rows), torch.randint(0, 2**14, (rows,), device=CUDA, dtype=torch.int32)
                    out = torch.empty(rows, dtype=torch.int64, device=CUDA)
                    return lambda: gumbel_argmax_triton(logits, slot, state, length, None, out)

                shape = {"rows": rows, "vocab": VOCAB, "dtype": str(dtype), "temperature": temperature}
                yield Case("gumbel_argmax", shape, bytes=rows * VOCAB * dtype.itemsize, flops=0, make=make)


def filter_cases() -> Iterator[Case]:
    """The floor is one reading of the logits. `floors` alone, and `choice`: the choice behind it."""
    kinds: list[dict[str, float]] = [
        {},
        {"min_p": 0.05},
        {"top_k": 50},
        {"top_p": 0.9},
        {"top_k": 20, "top_p": 0.95},
    ]
    for rows in (1, 64, 256):
        for asks in kinds:
            for flat in (False, True) if asks.get("top_p") == 0.9 else (False,):

                def make_floors(
                    rows: int = rows, asks: dict[str, float] = asks, flat: bool = flat
                ) -> Callable[[], object]:
                    # Flat: some 100,000 tokens stay, more than the list holds.
                    logits = torch.randn(rows, VOCAB, device=CUDA).to(BF16) if flat else peaked_logits(rows, BF16)
                    state, slot = sampling_state(rows, **asks), slot_of(rows)
                    return lambda: filter_floors_triton(logits, slot, state)

                shape = {"rows": rows, "vocab": VOCAB, "asks": asks, "flat": flat}
                moved = rows * VOCAB * 2 if asks else rows * 16
                yield Case("filter_floors", shape, bytes=moved, flops=0, make=make_floors)

        def make_choice(rows: int = rows) -> Callable[[], object]:
            logits, state = peaked_logits(rows, BF16), sampling_state(rows, top_k=20, top_p=0.95)
            slot, length = slot_of(rows), torch.zeros(rows, dtype=torch.int32, device=CUDA)
            floors = filter_floors_triton(logits, slot, state)
            return lambda: gumbel_argmax_triton(logits, slot, state, length, floors)

        yield Case("filtered_choice", {"rows": rows, "vocab": VOCAB}, bytes=rows * VOCAB * 2, flops=0, make=make_choice)


def penalty_cases() -> Iterator[Case]:
    """The floor is the counts, cleared, and each id read twice."""
    for rows, known, asking in (
        (1, 1024, True),
        (64, 1024, True),
        (256, 1024, True),
        (256, 1024, False),
        (4, 16_384, True),
    ):

        def make(rows: int = rows, known: int = known, asking: bool = asking) -> Callable[[], object]:
            slots = SlotState.allocate(rows, 16_384, 16, CUDA)
            slots.token_ids.random_(-1, VOCAB)
            slots.length.fill_(known)
            slots.prompt_len.fill_(known // 2)
            logits, slot = torch.randn(rows, VOCAB, device=CUDA), slot_of(rows)
            state = sampling_state(rows, presence=0.5, repetition=1.1) if asking else sampling_state(rows)
            return lambda: apply_penalties_triton(logits, slot, slots, state)

        moved = rows * (VOCAB * 4 + 2 * known * 4) if asking else rows * 16
        yield Case("penalties", {"rows": rows, "known": known, "asking": asking}, bytes=moved, flops=0, make=make)


def logprob_cases() -> Iterator[Case]:
    for rows in (1, 64, 256):
        for top in (0, 5, 20):

            def make(rows: int = rows, top: int = top) -> Callable[[], object]:
                logits, tokens = peaked_logits(rows, BF16), torch.randint(0, VOCAB, (rows,), device=CUDA)
                return lambda: logprobs_of_triton(logits, tokens, top)

            shape = {"rows": rows, "vocab": VOCAB, "top": top}
            yield Case("logprobs", shape, bytes=rows * VOCAB * 2, flops=0, make=make)


def prepare_cases() -> Iterator[Case]:
    """A step of decodes, and one chunk of prefill, in the buffers of an engine of 256 slots and 8,192 rows."""
    for entries, rows in ((1, 1), (64, 1), (256, 1), (1, 8192)):
        shape = {"entries": entries, "rows": entries * rows}
        moved = entries * rows * (4 + 4 + 4 + 1 + 8 + 8)
        make_prepare, make_advance = (_step_call(entries, rows, advance) for advance in (False, True))
        yield Case("prepare_inputs", shape, bytes=moved, flops=0, make=make_prepare)
        yield Case("advance_slots", shape, bytes=entries * 30, flops=0, make=make_advance)


def _step_call(entries: int, rows: int, advance: bool) -> Callable[[], Callable[[], object]]:
    def make() -> Callable[[], object]:
        slots = SlotState.allocate(256, 16_384, 16, CUDA)
        slots.computed.fill_(1000)
        slots.length.fill_(1001)
        inputs = StepInputs.allocate(8192, 256, CUDA)
        record = torch.zeros(3, 257, dtype=torch.int32, device=CUDA)
        record[SLOTS, :entries] = torch.randperm(256, device=CUDA)[:entries]
        record[STARTS] = (torch.arange(257, device=CUDA) * rows).clamp(max=entries * rows)
        sampled = torch.zeros(256, dtype=torch.int64, device=CUDA)
        if advance:
            return lambda: advance_slots_triton(record, entries, inputs, sampled, slots)
        return lambda: prepare_inputs_triton(record, entries, entries * rows, 16, slots, inputs)

    return make


def cache_write_cases() -> Iterator[Case]:
    for rows in (1, 256, 8192):

        def make(rows: int = rows) -> Callable[[], object]:
            qkv = torch.randn(rows, 48, 128, device=CUDA, dtype=BF16)
            caches = [torch.zeros(rows // 16 + 2, 16, 8, 128, device=CUDA, dtype=BF16) for _ in range(2)]
            index = 16 + torch.randperm(rows, device=CUDA)
            return lambda: write_kv_triton(qkv[:, 32:40], qkv[:, 40:], caches[0], caches[1], index)

        yield Case("write_kv", {"rows": rows}, bytes=2 * 2 * rows * 8 * 128 * 2, flops=0, make=make)


def fused_cases() -> Iterator[Case]:
    """Pieces of a layer of the Llama shape, at decode and prefill sizes."""
    hidden, intermediate = 4096, 14_336
    for rows in (1, 32, 256, 8192):

        def make_norm(rows: int = rows) -> Callable[[], object]:
            x, residual = torch.randn(2, rows, hidden, device=CUDA, dtype=BF16)
            weight = torch.randn(hidden, device=CUDA, dtype=BF16)
            return lambda: add_rms_norm_triton(x, residual, weight, 1e-5)

        def make_gated(rows: int = rows) -> Callable[[], object]:
            gate_up = torch.randn(rows, 2 * intermediate, device=CUDA, dtype=BF16)
            return lambda: gated_triton(gate_up, "silu")

        def make_rope(rows: int = rows) -> Callable[[], object]:
            q, k, v = torch.split(torch.randn(rows, 48, 128, device=CUDA, dtype=BF16), [32, 8, 8], dim=1)
            cos, sin = torch.randn(2, rows, 128, device=CUDA, dtype=BF16)
            caches = [torch.zeros(rows // 16 + 2, 16, 8, 128, device=CUDA, dtype=BF16) for _ in range(2)]
            index = 16 + torch.randperm(rows, device=CUDA)
            table, positions = RopeTable(cos, sin), torch.arange(rows, device=CUDA)
            return lambda: rope_and_write_triton(q, k, v, table, positions, caches[0], caches[1], index)

        yield Case("add_rms_norm", {"rows": rows}, bytes=4 * rows * hidden * 2, flops=0, make=make_norm)
        yield Case("gated", {"rows": rows}, bytes=3 * rows * intermediate * 2, flops=0, make=make_gated)
        yield Case("rope_and_write", {"rows": rows}, bytes=2 * rows * 49 * 128 * 2, flops=0, make=make_rope)


FAMILIES = (
    decode_cases,
    prefill_cases,
    sdpa_cases,
    gather_cases,
    gumbel_cases,
    filter_cases,
    penalty_cases,
    logprob_cases,
    prepare_cases,
    cache_write_cases,
    fused_cases,
)

DECODE_SWEEP = [Tiles(16, n, w, s) for n in (32, 64, 128) for w in (4, 8) for s in (2, 3, 4)]
PREFILL_SWEEP = [
    Tiles(m, n, w, s)
    for m, n, w in ((64, 64, 4), (128, 32, 8), (128, 64, 4), (128, 64, 8), (128, 128, 8))
    for s in (2, 3)
]


def sweep(only: str) -> None:
    if "decode".startswith(only):
        for shape, batch in ((LLAMA, 32), (LLAMA, 256), (QWEN, 1), (QWEN, 64), (GEMMA, 32)):
            _sweep(shape, [1] * batch, [1023] * batch, 1024, "decode_tiles", DECODE_SWEEP)
    if "prefill".startswith(only):
        for shape, rows in ((LLAMA, 8192), (QWEN, 2048), (GEMMA, 8192)):
            _sweep(shape, [rows], [0], rows, "prefill_tiles", PREFILL_SWEEP)


def _sweep(shape: Shape, rows: list[int], before: list[int], longest: int, kind: str, tiles: list[Tiles]) -> None:
    found: list[tuple[float, str]] = []
    base = attention_case("sweep", shape, rows, before, longest)
    for choice in tiles:

        def make(choice: Tiles = choice) -> Callable[[], object]:
            return attention_call(shape, rows, before, longest, {kind: choice})

        try:
            us = replace(base, make=make).measure()
        except Exception as error:  # this tile needs more shared memory than there is
            print(json.dumps({"tiles": str(choice), "error": str(error)[:100]}), flush=True)
            continue
        found.append((us, str(choice)))
    for us, name in sorted(found, reverse=True)[-5:]:
        line = {
            "case": "sweep",
            **base.shape,
            "tiles": name,
            "us": round(us, 2),
            "of_floor": round(base.floor_us / us, 3),
        }
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name begins so")
    parser.add_argument("--sweep", action="store_true", help="attention under other tiles instead")
    args = parser.parse_args()
    torch.manual_seed(0)
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__}), flush=True)
    if args.sweep:
        sweep(args.only)
        return
    for family in FAMILIES:
        # Inputs of a family's cases may be shared: they are made when it is asked for, and dropped after it.
        for case in family():
            if case.name.startswith(args.only):
                case.report()
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
