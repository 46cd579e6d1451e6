"""`admit`: the reference against plain copies, the kernel against the reference."""

from __future__ import annotations

import copy
import random
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from runner.kernels.admit import HEADER, admit
from runner.kernels.admit_triton import admit_triton
from runner.slots import SlotState

CPU = torch.device("cpu")
RECORD = 3 * 9


def make_case(seed: int, max_model_len: int) -> tuple[Tensor, list[tuple[int, list[int], list[int], list[int]]], int]:
    """(upload, [(slot, [known, computed, prompt_len, parameters …], ids, blocks)], the longest)"""
    rng = random.Random(seed)
    upload = torch.randint(-(2**31), 2**31 - 1, (20_000,), dtype=torch.int32)
    admissions, at = [], RECORD + 5 * HEADER
    for i, slot in enumerate(rng.sample(range(8), 5)):
        known = rng.randint(1, max_model_len)
        ids = [rng.randint(-1, 1000) for _ in range(known)]
        blocks = [rng.randint(1, 99) for _ in range(-(-known // 16))]
        # The bits of the floats are any: they must be moved as they are.
        rest = [rng.randint(0, known - 1), rng.randint(1, known), *(rng.randint(0, 2**30) for _ in range(10))]
        header = torch.tensor([slot, known, *rest, at, len(blocks)], dtype=torch.int32)
        upload[RECORD + i * HEADER : RECORD + (i + 1) * HEADER] = header
        upload[at : at + known + len(blocks)] = torch.tensor(ids + blocks, dtype=torch.int32)
        at += known + len(blocks)
        admissions.append((slot, [known, *rest], ids, blocks))
    return upload, admissions, max(len(ids) for _, _, ids, _ in admissions)


def make_state(max_model_len: int) -> tuple[SlotState, Tensor, Tensor]:
    slots = SlotState.allocate(8, max_model_len, 16, CPU)
    slots.fill_with_garbage(1000, 99)
    return slots, torch.rand(6, 8), torch.randint(0, 99, (4, 8), dtype=torch.int32)


def test_reference_copies_each_admission_into_its_slot() -> None:
    upload, admissions, longest = make_case(0, 40)
    slots, floats, ints = make_state(40)
    before = copy.deepcopy((slots, floats, ints))
    admit(upload, RECORD, len(admissions), longest, slots, floats, ints)
    for slot, header, ids, blocks in admissions:
        assert [int(slots.length[slot]), int(slots.computed[slot]), int(slots.prompt_len[slot])] == header[:3]
        assert floats[:, slot].view(torch.int32).tolist() == header[3:9] and ints[:, slot].tolist() == header[9:13]
        assert slots.token_ids[slot, : len(ids)].tolist() == ids
        assert slots.block_table[slot, : len(blocks)].tolist() == blocks
    for slot in set(range(8)) - {slot for slot, *_ in admissions}:
        assert torch.equal(slots.token_ids[slot], before[0].token_ids[slot])
        assert torch.equal(floats[:, slot], before[1][:, slot]) and torch.equal(ints[:, slot], before[2][:, slot])


@pytest.mark.parametrize("max_model_len", [40, 3000])
def test_kernel(max_model_len: int, triton_device: torch.device) -> None:
    upload, admissions, longest = make_case(1, max_model_len)
    slots, floats, ints = make_state(max_model_len)
    there = SlotState(**{f.name: getattr(slots, f.name).to(triton_device, copy=True) for f in fields(slots)})
    there_floats, there_ints = floats.to(triton_device, copy=True), ints.to(triton_device, copy=True)
    admit(upload, RECORD, len(admissions), longest, slots, floats, ints)
    admit_triton(upload.to(triton_device), RECORD, len(admissions), longest, there, there_floats, there_ints)
    for field in fields(slots):
        assert torch.equal(getattr(there, field.name).cpu(), getattr(slots, field.name))
    assert torch.equal(there_floats.cpu().view(torch.int32), floats.view(torch.int32))
    assert torch.equal(there_ints.cpu(), ints)
