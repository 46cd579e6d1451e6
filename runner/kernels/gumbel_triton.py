"""The Triton side of `runner.kernels.gumbel`: greedy and Gumbel-max in one pass over the logits.

The vocabulary is split over programs when the batch alone doesn't fill the device; a second, tiny launch then picks the
best of the splits. A row's parameters are read by its slot. The hash is the reference's, bit for bit.

A random row is bound by its arithmetic, some 30 instructions a token. So the choice is the least of minus everything,
in base 2 and less a constant: that changes nothing of which token it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runner.kernels._triton import INTERPRETED, tl, triton
from runner.kernels.filters import Floors
from runner.sampling_state import SamplingState

_BLOCK = 1024
_TARGET_PROGRAMS = 528
"""Four programs for each of an H200's 132 multiprocessors."""
_MAX_SPLITS = 512
_NO_ID = tl.constexpr(2**31 - 1)
_LOG2_E = tl.constexpr(1.4426950408889634)
_IN_HARDWARE = tl.constexpr(not INTERPRETED)


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    """MurmurHash3's fmix32 on uint32."""
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _log2(x):  # type: ignore[no-untyped-def]
    """The hardware's, one instruction for some twenty: its error is 2^-22, of the result or (near 1) absolute."""
    if _IN_HARDWARE:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def _lag(first, second, token):  # type: ignore[no-untyped-def]
    """Minus standard Gumbel noise / ln 2, and a constant less: log2 of (an exponential variable / ln 2)."""
    x = token.to(tl.uint32) * 0x9E3779B9 + first
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13) ^ second) * 0xC2B2AE35
    x = x ^ (x >> 16)
    v = tl.minimum(x.to(tl.float32) * 2.0**-32 + 2.0**-33, 1 - 2.0**-24)
    # -log2(1 - v): from the logarithm where 1 - v rounds harmlessly; else v times a polynomial (degree 5, relative
    # error 6e-8), which keeps full relative precision near 0, where the largest noise comes from.
    series = 0.4885594844818115
    series = series * v + 0.20865865051746368
    series = series * v + 0.37170201539993286
    series = series * v + 0.4802303910255432
    series = series * v + 0.7213620543479919
    series = series * v + 1.4426950216293335
    return _log2(tl.where(v < 0.25, v * series, -_log2(1.0 - v)))


@triton.jit
def _consider(  # type: ignore[no-untyped-def]
    logits, token, end, best, best_id, random, minus_scale, first, second, floor, last,
    FILTERED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Each lane keeps its own best, so that the loop has no reduction. MASKED: some tokens may not be below `end`."""
    if MASKED:
        value = tl.load(logits + token, mask=token < end, other=float("-inf")).to(tl.float32)
    else:
        value = tl.load(logits + token).to(tl.float32)
    if FILTERED:
        stays = (value > floor) | ((value == floor) & (token <= last))
        value = tl.where(stays, value, float("-inf"))
    if random:  # noqa: SIM108 (a branch: a greedy row skips the noise)
        cost = value * minus_scale + _lag(first, second, token)
    else:
        cost = -value
    # False for NaN: it never wins, and the id stays in range whatever the logits are.
    better = cost < best
    return tl.where(better, cost, best), tl.where(better, token, best_id)


@triton.jit
def _choose_kernel(  # type: ignore[no-untyped-def]
    logits, logits_stride, slot, floats, ints, num_slots, length, floors, lasts, best_costs, best_ids,
    vocab_size, split_size, FILTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (n, s) finds the best of row n's ids s * split_size and up; ties go to the lowest id."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    start = split * split_size
    end = tl.minimum(start + split_size, vocab_size)
    whole_end = start + (end - start) // BLOCK * BLOCK

    index = tl.load(slot + row).to(tl.int64)
    heat = tl.load(floats + index)
    random = heat > 0
    # A finite scale, however small the temperature is: a logit of 0 must stay 0.
    minus_scale = -tl.minimum(tl.div_rn(_LOG2_E, tl.where(random, heat, 1.0)), 1e30)
    choice = tl.load(ints + num_slots + index).to(tl.uint32)
    low = tl.load(ints + 2 * num_slots + index).to(tl.uint32)
    high = tl.load(ints + 3 * num_slots + index).to(tl.uint32)
    position = tl.load(length + index).to(tl.uint32)
    first = _mix(_mix(_mix(_mix(low ^ 0x9E3779B9) ^ high) ^ choice) ^ position)
    second = _mix(_mix(_mix(_mix(position ^ 0x9E3779B9) ^ choice) ^ high) ^ low)
    floor, last = float("-inf"), 0
    if FILTERED:
        floor, last = tl.load(floors + row), tl.load(lasts + row)

    logits += row * logits_stride
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("inf"), tl.float32)
    best_id = start + lanes
    for tile in range(start, whole_end, BLOCK):
        best, best_id = _consider(
            logits, tile + lanes, end, best, best_id, random, minus_scale, first, second, floor, last, FILTERED, False
        )
    if whole_end < end:
        best, best_id = _consider(
            logits,
            whole_end + lanes,
            end,
            best,
            best_id,
            random,
            minus_scale,
            first,
            second,
            floor,
            last,
            FILTERED,
            True,
        )
    top = tl.min(best, 0)
    index = row * tl.num_programs(1) + split
    tl.store(best_costs + index, top)
    tl.store(best_ids + index, tl.min(tl.where(best == top, best_id, _NO_ID), 0).to(tl.int64))


@triton.jit(do_not_specialize=["num_splits"])
def _reduce_kernel(  # type: ignore[no-untyped-def]
    best_costs, best_ids, out, num_splits, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    split = tl.arange(0, BLOCK)
    here = split < num_splits
    cost = tl.load(best_costs + row * num_splits + split, mask=here, other=float("inf"))
    index = tl.load(best_ids + row * num_splits + split, mask=here, other=_NO_ID)
    tl.store(out + row, tl.min(tl.where(cost == tl.min(cost, 0), index, _NO_ID), 0))


def gumbel_argmax_triton(logits: Tensor, slot: Tensor, sampling: SamplingState, length: Tensor,
                         floors: Floors | None = None, out: Tensor | None = None) -> Tensor:  # fmt: skip
    num_rows, vocab_size = logits.shape
    if logits.stride(1) != 1 or not all(t.is_contiguous() for t in (slot, sampling.floats, sampling.ints, length)):
        raise ValueError("the kernel reads contiguous rows and parameters")
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device) if out is None else out[:num_rows]
    if num_rows == 0:
        return tokens
    tiles = triton.cdiv(vocab_size, _BLOCK)
    split_size = triton.cdiv(tiles, min(tiles, _MAX_SPLITS, triton.cdiv(_TARGET_PROGRAMS, num_rows))) * _BLOCK
    num_splits = triton.cdiv(vocab_size, split_size)
    values = torch.empty(num_rows, num_splits, dtype=torch.float32, device=logits.device)
    ids = tokens if num_splits == 1 else torch.empty(num_rows, num_splits, dtype=torch.int64, device=logits.device)
    # Without floors their pointers are never read: any tensor will do.
    floor_values, floor_lasts = (values, values) if floors is None else (floors.value, floors.last)
    _choose_kernel[(num_rows, num_splits)](
        logits, logits.stride(0), slot, sampling.floats, sampling.ints, sampling.ints.shape[1], length,
        floor_values, floor_lasts, values, ids,
        vocab_size, split_size, FILTERED=floors is not None, BLOCK=_BLOCK,
    )  # fmt: skip
    if num_splits > 1:
        _reduce_kernel[(num_rows,)](values, ids, tokens, num_splits, BLOCK=_MAX_SPLITS)
    return tokens
