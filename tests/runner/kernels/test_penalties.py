"""`apply_penalties`: the kernels against the reference, whose formulas are tested in `tests/runner/test_sampler.py`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runner.hints import hinted_ids
from runner.kernels.penalties import apply_penalties, apply_penalties_reference
from runner.kernels.penalties_triton import apply_penalties_triton
from runner.messages import EMBEDDING_ID
from runner.sampling_state import SamplingState
from runner.slots import SlotState

CPU = torch.device("cpu")
Case = tuple[Tensor, Tensor, SlotState, SamplingState]


def make_case(rows: int, vocab: int, max_model_len: int) -> Case:
    """(logits, slot, slots, sampling). Some rows ask for nothing; ids past a length, and free slots, hold garbage."""
    torch.manual_seed(vocab + rows)
    num_slots = rows + 3
    slots = SlotState.allocate(num_slots, max_model_len, 16, CPU)
    slots.fill_with_garbage(vocab, 9)
    # Few ids, so that they come again and again, and between them embedding rows, some with hints of the same ids.
    repeated = torch.randint(0, min(vocab, 9), slots.token_ids.shape, dtype=torch.int32)
    slots.token_ids = torch.where(torch.rand(slots.token_ids.shape) < 0.5, repeated, slots.token_ids)
    slots.token_ids[torch.rand(slots.token_ids.shape) < 0.2] = EMBEDDING_ID
    hinted = torch.from_numpy(hinted_ids(repeated.numpy()))
    slots.token_ids = torch.where(torch.rand(slots.token_ids.shape) < 0.1, hinted, slots.token_ids)
    slots.length = torch.randint(1, max_model_len + 1, (num_slots,), dtype=torch.int32)
    slots.prompt_len = (slots.length * torch.rand(num_slots)).int()
    sampling = SamplingState.allocate(num_slots, CPU)
    sampling.floats.uniform_(0.3, 2.0)
    neutral = torch.tensor([0.0, 0.0, 1.0])[:, None].expand(3, num_slots)
    sampling.floats[3:6] = torch.where(torch.rand(3, num_slots) < 0.4, neutral, sampling.floats[3:6])
    sampling.floats[3:6, ::4] = neutral[:, ::4]
    sampling.floats[3:5, 1::2] *= -1
    return torch.randn(rows, vocab) * 3, torch.randperm(num_slots)[:rows].int(), slots, sampling


def on(device: torch.device, logits: Tensor, slot: Tensor, slots: SlotState, sampling: SamplingState) -> Case:
    """A copy of the case, on a device."""
    state = SlotState(*(getattr(slots, name).to(device) for name in SlotState.__dataclass_fields__))
    parameters = SamplingState(sampling.floats.to(device), sampling.ints.to(device))
    return logits.to(device, copy=True), slot.to(device), state, parameters


def compare(case: Case, device: torch.device) -> Tensor:
    """The penalised logits, by the reference."""
    expected, slot, slots, sampling = on(CPU, *case)
    apply_penalties_reference(expected, slot, slots, sampling)
    result, slot, slots, sampling = on(device, *case)
    apply_penalties_triton(result, slot, slots, sampling)
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-6, atol=1e-5)
    unchanged = expected == case[0]
    assert torch.equal(result.cpu()[unchanged], case[0][unchanged])
    return expected


@pytest.mark.parametrize(("rows", "vocab", "max_model_len"), [(1, 5, 1), (7, 300, 40), (6, 5003, 3000)])
def test_penalty_kernels(rows: int, vocab: int, max_model_len: int, triton_device: torch.device) -> None:
    case = make_case(rows, vocab, max_model_len)
    expected = compare(case, triton_device)
    assert rows == 1 or not torch.equal(expected, case[0])


def test_a_long_sequence_is_shared_by_its_programs(triton_device: torch.device) -> None:
    """More tiles than there are programs for one row."""
    case = make_case(1, 50, 9500)
    _, slot, slots, sampling = case
    slots.length[slot.long()] = 9500
    sampling.floats[3:6, slot.long()] = torch.tensor([[0.5], [0.001], [1.3]])
    compare(case, triton_device)


def test_low_precision_logits_are_refused() -> None:
    """A penalty of 0.1 is nothing to a bfloat16 of 20."""
    logits, slot, slots, sampling = make_case(1, 5, 4)
    with pytest.raises(ValueError, match="rounded away"):
        apply_penalties(logits.bfloat16(), slot, slots, sampling)
