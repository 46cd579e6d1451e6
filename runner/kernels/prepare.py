"""Derives a step's inputs from the schedule and the slots, and moves the slots on once its tokens are sampled.

Called by `runner.device_step`, first and last thing in every step, on every path. `is_token_ids` is born here.

The schedule of a step is one int32 record, [3, S + 1], on the device:
    row 0, SLOTS: the slot of entry i (0 past the last entry);
    row 1, STARTS: the first row of entry i; from the last entry on, the step's number of rows;
    row 2, NEW_BLOCKS: the block that the slot's table gets for the entry's last row; 0 where it has one already.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runner.hints import FIRST_HINT
from runner.messages import EMBEDDING_ID
from runner.slots import SlotState, StepInputs

SLOTS, STARTS, NEW_BLOCKS = range(3)


def prepare_inputs(record: Tensor, num_entries: int, num_rows: int, block_size: int, slots: SlotState,
                   out: StepInputs) -> None:  # fmt: skip
    """Fills `out` and extends the block tables.

    Args:
        record: [3, S + 1] int32, device; see the module's docstring.
        num_entries, num_rows: of this step, on the host.
        slots: `block_table` is written, the rest only read.
        out: every buffer is written whole, padding included.
    """
    if record.is_cuda:
        from runner.kernels.prepare_triton import prepare_inputs_triton

        prepare_inputs_triton(record, num_entries, num_rows, block_size, slots, out)
    else:
        prepare_inputs_reference(record, num_entries, num_rows, block_size, slots, out)


def prepare_inputs_reference(record: Tensor, num_entries: int, num_rows: int, block_size: int, slots: SlotState,
                             out: StepInputs) -> None:  # fmt: skip
    starts = record[STARTS, : num_entries + 1].long()
    slot = record[SLOTS, :num_entries].long()
    new_block = record[NEW_BLOCKS, :num_entries]
    counts = starts[1:] - starts[:-1]
    seq_lens = slots.computed[slot].long() + counts

    last_block = (seq_lens - 1) // block_size
    slots.block_table[slot, last_block] = torch.where(new_block > 0, new_block, slots.block_table[slot, last_block])

    entry = torch.repeat_interleave(torch.arange(num_entries, device=record.device), counts, output_size=num_rows)
    row_slot = slot[entry]
    positions = slots.computed[row_slot].long() + torch.arange(num_rows, device=record.device) - starts[entry]
    ids = slots.token_ids[row_slot, positions]
    block = slots.block_table[row_slot, positions // block_size].long()

    for buffer in (out.token_ids, out.positions, out.cache_index, out.seq_lens, out.last_rows, out.samples):
        buffer.zero_()
    out.is_token_ids.fill_(True)
    out.is_token_ids[:num_rows] = ids >= 0  # below are embeddings, with and without hints
    out.token_ids[:num_rows] = ids.clamp(min=0)
    out.positions[:num_rows] = positions
    out.cache_index[:num_rows] = block * block_size + positions % block_size
    out.seq_lens[:num_entries] = seq_lens.int()
    out.last_rows[:num_entries] = starts[1:] - 1
    out.samples[:num_entries] = seq_lens == slots.length[slot]
    if out.attend_until is not None:
        out.attend_until.fill_(1)
        is_end = (ids < EMBEDDING_ID) & (ids > FIRST_HINT)
        out.attend_until[:num_rows] = torch.where(is_end, -1 - ids, positions.int() + 1)


def advance_slots(record: Tensor, num_entries: int, inputs: StepInputs, sampled: Tensor, slots: SlotState) -> None:
    """Counts the step's rows as computed and appends each sampled token to its slot.

    Args:
        sampled: [S] int64, device; read at the entries where `inputs.samples`.
    """
    if record.is_cuda:
        from runner.kernels.prepare_triton import advance_slots_triton

        advance_slots_triton(record, num_entries, inputs, sampled, slots)
    else:
        advance_slots_reference(record, num_entries, inputs, sampled, slots)


def advance_slots_reference(record: Tensor, num_entries: int, inputs: StepInputs, sampled: Tensor,
                            slots: SlotState) -> None:  # fmt: skip
    slot = record[SLOTS, :num_entries].long()
    samples = inputs.samples[:num_entries]
    slots.computed[slot] = inputs.seq_lens[:num_entries]
    # A sequence at max_model_len has no room for the token that ends it; the host still gets it from `sampled`.
    keep = samples & (slots.length[slot] < slots.token_ids.shape[1])
    slots.token_ids[slot[keep], slots.length[slot[keep]].long()] = sampled[:num_entries][keep].int()
    slots.length[slot[samples]] += 1
