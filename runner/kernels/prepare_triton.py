"""The Triton side of `runner.kernels.prepare`: one launch derives a step's inputs, one launch moves the slots on.

Everything is read from the record on the device: an entry without rows is padding, and the step's rows end where the
record says. The host's counts are not even passed on, so one captured graph serves any schedule.
"""

from __future__ import annotations

from torch import Tensor

from runner.hints import FIRST_HINT
from runner.kernels._triton import tl, triton
from runner.messages import EMBEDDING_ID
from runner.slots import SlotState, StepInputs

_BLOCK = 128


@triton.jit(do_not_specialize=["num_slots", "max_rows"])
def _prepare_kernel(  # type: ignore[no-untyped-def]
    record, record_stride,
    slot_token_ids, slot_token_ids_stride, slot_block_table, slot_block_table_stride, slot_length, slot_computed,
    token_ids, is_token_ids, positions, cache_index, seq_lens, last_rows, samples, attend_until,
    num_slots, max_rows, block_size,
    TWO_WAY: tl.constexpr, SEARCH_STEPS: tl.constexpr, BLOCK: tl.constexpr, NO_END: tl.constexpr, HINTS: tl.constexpr,
):  # fmt: skip
    """Program p derives rows and entries p * BLOCK and up. Only entries write the block table, and no row reads what
    an entry of the same launch writes: a row in its entry's last block takes the new block from the record."""
    starts = record + record_stride
    new_blocks = record + 2 * record_stride
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)

    # Rows.
    in_step = lanes < tl.load(starts + num_slots)
    # The entry of a row: the last one that starts at or before it.
    low = tl.zeros([BLOCK], tl.int32)
    high = tl.zeros([BLOCK], tl.int32) + num_slots
    for _ in range(SEARCH_STEPS):
        middle = (low + high) // 2
        before = tl.load(starts + middle, mask=in_step, other=0) <= lanes
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    start = tl.load(starts + low, mask=in_step, other=0)
    end = tl.load(starts + low + 1, mask=in_step, other=0)
    slot = tl.load(record + low, mask=in_step, other=0).to(tl.int64)
    new_block = tl.load(new_blocks + low, mask=in_step, other=0)
    computed = tl.load(slot_computed + slot, mask=in_step, other=0)
    position = computed + lanes - start
    last_position = computed + end - start - 1
    token = tl.load(slot_token_ids + slot * slot_token_ids_stride + position, mask=in_step, other=0)
    index = position // block_size
    is_new = (index == last_position // block_size) & (new_block > 0)
    old_block = tl.load(slot_block_table + slot * slot_block_table_stride + index, mask=in_step & ~is_new, other=0)
    block = tl.where(is_new, new_block, old_block).to(tl.int64)
    # Padding: token 0 at position 0, written to row 0 of the dummy block.
    here = lanes < max_rows
    tl.store(token_ids + lanes, tl.maximum(token, 0), mask=here)
    tl.store(is_token_ids + lanes, token >= 0, mask=here)
    if TWO_WAY:
        ends = (token < NO_END) & (token > HINTS)
        until = tl.where(ends, -1 - token, tl.where(in_step, position, 0) + 1)
        tl.store(attend_until + lanes, until, mask=here)
    tl.store(positions + lanes, tl.where(in_step, position, 0).to(tl.int64), mask=here)
    tl.store(cache_index + lanes, tl.where(in_step, block * block_size + position % block_size, 0), mask=here)

    # Entries.
    here = lanes < num_slots
    start = tl.load(starts + lanes, mask=here, other=0)
    end = tl.load(starts + lanes + 1, mask=here, other=0)
    real = end > start
    slot = tl.load(record + lanes, mask=real, other=0).to(tl.int64)
    new_block = tl.load(new_blocks + lanes, mask=real, other=0)
    seq_len = tl.load(slot_computed + slot, mask=real, other=0) + end - start
    length = tl.load(slot_length + slot, mask=real, other=0)
    index = (seq_len - 1) // block_size
    tl.store(slot_block_table + slot * slot_block_table_stride + index, new_block, mask=real & (new_block > 0))
    tl.store(seq_lens + lanes, tl.where(real, seq_len, 0), mask=here)
    tl.store(last_rows + lanes, tl.where(real, end - 1, 0).to(tl.int64), mask=here)
    tl.store(samples + lanes, real & (seq_len == length), mask=here)


def prepare_inputs_triton(record: Tensor, num_entries: int, num_rows: int, block_size: int, slots: SlotState,
                          out: StepInputs) -> None:  # fmt: skip
    num_slots = record.shape[1] - 1
    max_rows = out.token_ids.shape[0]
    grid = (triton.cdiv(max(max_rows, num_slots), _BLOCK),)
    two_way = out.attend_until is not None
    _prepare_kernel[grid](
        record, record.stride(0),
        slots.token_ids, slots.token_ids.stride(0), slots.block_table, slots.block_table.stride(0),
        slots.length, slots.computed,
        out.token_ids, out.is_token_ids, out.positions, out.cache_index, out.seq_lens, out.last_rows, out.samples,
        out.attend_until if two_way else out.seq_lens, num_slots, max_rows, block_size,
        TWO_WAY=two_way, SEARCH_STEPS=num_slots.bit_length(), BLOCK=_BLOCK, NO_END=EMBEDDING_ID, HINTS=FIRST_HINT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_slots"])
def _advance_kernel(  # type: ignore[no-untyped-def]
    record, record_stride, seq_lens, samples, sampled,
    slot_token_ids, slot_token_ids_stride, slot_length, slot_computed,
    num_slots, max_model_len, BLOCK: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = entry < num_slots
    starts = record + record_stride
    real = tl.load(starts + entry + 1, mask=here, other=0) > tl.load(starts + entry, mask=here, other=0)
    slot = tl.load(record + entry, mask=real, other=0).to(tl.int64)
    tl.store(slot_computed + slot, tl.load(seq_lens + entry, mask=real, other=0), mask=real)

    samples_here = real & (tl.load(samples + entry, mask=real, other=0) != 0)
    length = tl.load(slot_length + slot, mask=samples_here, other=0)
    token = tl.load(sampled + entry, mask=samples_here, other=0).to(tl.int32)
    # A sequence at max_model_len has no room for the token that ends it.
    tl.store(
        slot_token_ids + slot * slot_token_ids_stride + length, token, mask=samples_here & (length < max_model_len)
    )
    tl.store(slot_length + slot, length + 1, mask=samples_here)


def advance_slots_triton(record: Tensor, num_entries: int, inputs: StepInputs, sampled: Tensor,
                         slots: SlotState) -> None:  # fmt: skip
    num_slots = min(record.shape[1] - 1, sampled.shape[0])
    _advance_kernel[(triton.cdiv(num_slots, _BLOCK),)](
        record, record.stride(0), inputs.seq_lens, inputs.samples, sampled,
        slots.token_ids, slots.token_ids.stride(0), slots.length, slots.computed,
        num_slots, slots.token_ids.shape[1], BLOCK=_BLOCK,
    )  # fmt: skip
