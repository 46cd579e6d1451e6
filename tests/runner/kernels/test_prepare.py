"""`prepare_inputs` and `advance_slots`: the reference against a loop in Python, the kernels against the reference."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.hints import FIRST_HINT, hinted_ids
from runner.kernels.prepare import (
    NEW_BLOCKS,
    SLOTS,
    STARTS,
    advance_slots,
    advance_slots_reference,
    prepare_inputs,
    prepare_inputs_reference,
)
from runner.kernels.prepare_triton import advance_slots_triton, prepare_inputs_triton
from runner.messages import EMBEDDING_ID
from runner.slots import SlotState, StepInputs

VOCAB = 1000
CPU = torch.device("cpu")


@dataclass
class Step:
    """A random schedule over random slots; `slots` and `out` start full of garbage where nobody may look."""

    slots: SlotState
    out: StepInputs
    record: Tensor
    entries: list[tuple[int, int]]
    """(slot, rows)"""
    block_size: int
    num_rows: int

    def on(self, device: torch.device) -> Step:
        clone = copy.deepcopy(self)
        clone.record = clone.record.to(device)
        for state in (clone.slots, clone.out):
            for field in fields(state):
                value = getattr(state, field.name)
                setattr(state, field.name, None if value is None else value.to(device))
        return clone

    def prepare_args(self) -> tuple[Any, ...]:
        return self.record, len(self.entries), self.num_rows, self.block_size, self.slots, self.out


def make_step(seed: int, *, num_slots: int, max_rows: int, max_model_len: int, block_size: int) -> Step:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    slots = SlotState.allocate(num_slots, max_model_len, block_size, CPU)
    slots.fill_with_garbage(VOCAB, num_blocks=500)
    record = torch.zeros(3, num_slots + 1, dtype=torch.int32)
    chosen = rng.sample(range(num_slots), rng.randint(0, num_slots))
    entries: list[tuple[int, int]] = []
    left = max_rows
    for slot in chosen:
        computed = rng.choice([0, rng.randrange(max_model_len), block_size - 1, max_model_len - 1])
        most = min(left, max_model_len - computed)
        if most < 1:
            break
        rows = 1 if rng.random() < 0.5 else rng.randint(1, most)
        # A chunk that ends before the last known row, at it, and at the very end of the context.
        length = rng.choice([computed + rows, rng.randint(computed + rows, max_model_len)])
        slots.computed[slot], slots.length[slot] = computed, length
        ids = torch.randint(0, VOCAB, (rows,)).int()
        embedding = torch.full((rows,), EMBEDDING_ID, dtype=torch.int32)
        if seed % 2:  # half of the embeddings are rows of two-way spans, each with an end of its own
            ends = torch.arange(computed, computed + rows).int() + torch.randint(1, 9, (rows,)).int()
            embedding = torch.where(torch.rand(rows) < 0.5, embedding, -1 - ends)
        hinted = torch.from_numpy(hinted_ids(torch.randint(0, VOCAB, (rows,)).int().numpy()))
        embedding = torch.where(torch.rand(rows) < 0.3, hinted, embedding)
        slots.token_ids[slot, computed : computed + rows] = torch.where(torch.rand(rows) < 0.5, embedding, ids)
        i = len(entries)
        record[SLOTS, i] = slot
        record[STARTS, i + 1] = record[STARTS, i] + rows
        record[NEW_BLOCKS, i] = rng.choice([0, rng.randint(1, 499)])
        entries.append((slot, rows))
        left -= rows
    num_rows = int(record[STARTS, len(entries)])
    record[STARTS, len(entries) :] = num_rows
    out = StepInputs.allocate(max_rows, num_slots, CPU, two_way=bool(seed % 2))
    for field in fields(out):
        buffer = getattr(out, field.name)
        if buffer is not None:
            buffer.copy_(torch.randint(0, 2, buffer.shape))
    return Step(slots, out, record, entries, block_size, num_rows)


def random_steps() -> list[Any]:
    shapes = [(1, 1, 20, 16), (4, 12, 40, 16), (7, 300, 100, 32), (150, 200, 64, 16), (16, 5, 33, 32)]
    keys = ("num_slots", "max_rows", "max_model_len", "block_size")
    return [
        pytest.param(seed, dict(zip(keys, shape, strict=True)), id=f"{shape}-{seed}")
        for shape in shapes
        for seed in range(4)
    ]


def assert_same(ours: Any, theirs: Any) -> None:
    for field in fields(ours):
        our, their = getattr(ours, field.name), getattr(theirs, field.name)
        assert our is their or torch.equal(our.cpu(), their.cpu()), field.name


@pytest.mark.parametrize(("seed", "shape"), random_steps())
def test_prepare_is_what_a_loop_over_rows_gives(seed: int, shape: dict[str, int]) -> None:
    step = make_step(seed, **shape)
    before = copy.deepcopy(step.slots)
    prepare_inputs(*step.prepare_args())
    out, slots, size = step.out, step.slots, step.block_size

    table = before.block_table.tolist()
    expected_rows: list[tuple[int, bool, int, int]] = []
    expected_until: list[int] = []
    for i, (slot, rows) in enumerate(step.entries):
        computed = int(before.computed[slot])
        new_block = int(step.record[NEW_BLOCKS, i])
        if new_block:
            table[slot][(computed + rows - 1) // size] = new_block
        for position in range(computed, computed + rows):
            token = int(before.token_ids[slot, position])
            block = table[slot][position // size]
            expected_rows.append((max(token, 0), token >= 0, position, block * size + position % size))
            expected_until.append(-1 - token if FIRST_HINT < token < EMBEDDING_ID else position + 1)
        assert out.seq_lens[i] == computed + rows
        assert out.last_rows[i] == len(expected_rows) - 1
        assert bool(out.samples[i]) == (computed + rows == int(before.length[slot]))
    padding = (0, True, 0, 0)
    expected_rows += [padding] * (shape["max_rows"] - len(expected_rows))
    columns = (out.token_ids, out.is_token_ids, out.positions, out.cache_index)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected_rows
    if seed % 2:
        assert out.attend_until is not None
        assert out.attend_until.tolist() == expected_until + [1] * (shape["max_rows"] - len(expected_until))
    else:
        assert out.attend_until is None
    for buffer in (out.seq_lens, out.last_rows, out.samples):
        assert not buffer[len(step.entries) :].any()
    assert slots.block_table.tolist() == table
    assert_same(SlotState(slots.token_ids, before.block_table, slots.length, slots.computed, slots.prompt_len), before)


@pytest.mark.parametrize(("seed", "shape"), random_steps())
def test_advance_is_what_a_loop_over_entries_gives(seed: int, shape: dict[str, int]) -> None:
    step = make_step(seed, **shape)
    prepare_inputs(*step.prepare_args())
    expected = copy.deepcopy(step.slots)
    sampled = torch.randint(0, VOCAB, (shape["num_slots"],))
    for i, (slot, rows) in enumerate(step.entries):
        expected.computed[slot] += rows
        length = int(expected.length[slot])
        if expected.computed[slot] == length:
            if length < shape["max_model_len"]:
                expected.token_ids[slot, length] = sampled[i]
            expected.length[slot] += 1
    advance_slots(step.record, len(step.entries), step.out, sampled, step.slots)
    assert_same(step.slots, expected)


@pytest.mark.parametrize(("seed", "shape"), random_steps())
def test_prepare_kernel(seed: int, shape: dict[str, int], triton_device: torch.device) -> None:
    step = make_step(seed, **shape)
    on_device = step.on(triton_device)
    prepare_inputs_reference(*step.prepare_args())
    prepare_inputs_triton(*on_device.prepare_args())
    assert_same(on_device.out, step.out)
    assert_same(on_device.slots, step.slots)


def test_the_kernels_take_every_count_from_the_record(triton_device: torch.device) -> None:
    """A captured graph replays with whatever counts the host had at the capture."""
    step = make_step(3, num_slots=7, max_rows=60, max_model_len=50, block_size=16)
    on_device = step.on(triton_device)
    prepare_inputs_reference(*step.prepare_args())
    prepare_inputs_triton(on_device.record, 1, 1, 16, on_device.slots, on_device.out)
    assert_same(on_device.out, step.out)
    sampled = torch.randint(0, VOCAB, (7,))
    advance_slots_reference(step.record, len(step.entries), step.out, sampled, step.slots)
    advance_slots_triton(on_device.record, 1, on_device.out, sampled.to(triton_device), on_device.slots)
    assert_same(on_device.slots, step.slots)


@pytest.mark.parametrize(("seed", "shape"), random_steps())
def test_advance_kernel(seed: int, shape: dict[str, int], triton_device: torch.device) -> None:
    step = make_step(seed, **shape)
    prepare_inputs_reference(*step.prepare_args())
    on_device = step.on(triton_device)
    sampled = torch.randint(0, VOCAB, (shape["num_slots"],))
    advance_slots_reference(step.record, len(step.entries), step.out, sampled, step.slots)
    advance_slots_triton(on_device.record, len(step.entries), on_device.out, sampled.to(triton_device), on_device.slots)
    assert_same(on_device.slots, step.slots)
