"""The Triton side of `runner.kernels.penalties`: clear a row of counts, count the sequence into it, penalise what is
counted. Three launches, in each of which rows that don't ask end at once.

The work is the sequence's length, but for the clearing. A word of the counts holds twice how often the token was
answered, plus one if it is in the prompt; whoever takes a token's word out penalises the token, so each is penalised
once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runner.hints import FIRST_HINT
from runner.kernels._triton import tl, triton
from runner.sampling_state import SamplingState
from runner.slots import SlotState

_BLOCK = 1024
_CLEAR_BLOCK = 4096
_PARTS = 8
"""Programs that share a sequence, whatever its length: it is known on the device only."""


@triton.jit
def _load_penalties(floats, num_slots, index):  # type: ignore[no-untyped-def]
    presence = tl.load(floats + 3 * num_slots + index)
    frequency = tl.load(floats + 4 * num_slots + index)
    repetition = tl.load(floats + 5 * num_slots + index)
    return presence, frequency, repetition


@triton.jit
def _clear_kernel(slot, floats, num_slots, counts, vocab_size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    presence, frequency, repetition = _load_penalties(floats, num_slots, tl.load(slot + row).to(tl.int64))
    if (presence != 0) | (frequency != 0) | (repetition != 1):
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        tl.store(counts + row * vocab_size + token, tl.zeros([BLOCK], tl.int32), mask=token < vocab_size)


@triton.jit
def _count_kernel(  # type: ignore[no-untyped-def]
    slot, floats, num_slots, token_ids, token_ids_stride, length, prompt_len, counts, vocab_size,
    FIRST_HINT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    index = tl.load(slot + row).to(tl.int64)
    presence, frequency, repetition = _load_penalties(floats, num_slots, index)
    if (presence != 0) | (frequency != 0) | (repetition != 1):
        known = tl.load(length + index)
        prompt = tl.load(prompt_len + index)
        for tile in range(tl.program_id(1) * BLOCK, known, tl.num_programs(1) * BLOCK):
            place = tile + tl.arange(0, BLOCK)
            token = tl.load(token_ids + index * token_ids_stride + place, mask=place < known, other=-1)
            token = tl.where(token <= FIRST_HINT, FIRST_HINT - token, token)  # `hints.counted_ids`
            counted = (token >= 0) & (token < vocab_size)
            word = counts + row * vocab_size + token
            tl.atomic_or(word, 1, mask=counted & (place < prompt), sem="relaxed")
            tl.atomic_add(word, 2, mask=counted & (place >= prompt), sem="relaxed")


@triton.jit
def _penalise_kernel(  # type: ignore[no-untyped-def]
    logits, logits_stride, slot, floats, num_slots, token_ids, token_ids_stride, length, counts, vocab_size,
    FIRST_HINT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    index = tl.load(slot + row).to(tl.int64)
    presence, frequency, repetition = _load_penalties(floats, num_slots, index)
    if (presence != 0) | (frequency != 0) | (repetition != 1):
        known = tl.load(length + index)
        for tile in range(tl.program_id(1) * BLOCK, known, tl.num_programs(1) * BLOCK):
            place = tile + tl.arange(0, BLOCK)
            token = tl.load(token_ids + index * token_ids_stride + place, mask=place < known, other=-1)
            token = tl.where(token <= FIRST_HINT, FIRST_HINT - token, token)  # `hints.counted_ids`
            counted = (token >= 0) & (token < vocab_size)
            word = tl.atomic_xchg(counts + row * vocab_size + token, 0, mask=counted, sem="relaxed")
            mine = counted & (word != 0)
            logit = tl.load(logits + row * logits_stride + token, mask=mine, other=0.0)
            logit = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
            times = (word >> 1).to(tl.float32)
            logit = logit - frequency * times - tl.where(times > 0, presence, 0.0)
            tl.store(logits + row * logits_stride + token, logit, mask=mine)


def apply_penalties_triton(logits: Tensor, slot: Tensor, slots: SlotState, sampling: SamplingState) -> None:
    num_rows, vocab_size = logits.shape
    if logits.stride(1) != 1 or not all(t.is_contiguous() for t in (slot, sampling.floats, slots.token_ids)):
        raise ValueError("the kernels read contiguous rows and parameters")
    if num_rows == 0:
        return
    counts = torch.empty(num_rows, vocab_size, dtype=torch.int32, device=logits.device)
    num_slots = sampling.floats.shape[1]
    ids, stride = slots.token_ids, slots.token_ids.stride(0)
    parts = min(_PARTS, triton.cdiv(ids.shape[1], _BLOCK))
    _clear_kernel[(num_rows, triton.cdiv(vocab_size, _CLEAR_BLOCK))](
        slot, sampling.floats, num_slots, counts, vocab_size, BLOCK=_CLEAR_BLOCK
    )
    _count_kernel[(num_rows, parts)](
        slot, sampling.floats, num_slots, ids, stride, slots.length, slots.prompt_len, counts, vocab_size,
        FIRST_HINT=FIRST_HINT, BLOCK=_BLOCK,
    )  # fmt: skip
    _penalise_kernel[(num_rows, parts)](
        logits, logits.stride(0), slot, sampling.floats, num_slots, ids, stride, slots.length, counts, vocab_size,
        FIRST_HINT=FIRST_HINT, BLOCK=_BLOCK,
    )  # fmt: skip
