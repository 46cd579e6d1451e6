"""The Triton side of `runner.kernels.gumbel`: greedy and Gumbel-max in one pass over the logits.

The vocabulary is split over programs when the batch alone doesn't fill the device; a second, tiny launch then picks the
best of the splits. The hash is the reference's, bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runner.kernels._triton import tl, triton

_BLOCK = 1024
_TARGET_PROGRAMS = 528
"""Four programs for each of an H200's 132 multiprocessors."""
_MAX_SPLITS = 512
_NO_ID = tl.constexpr(2**31 - 1)


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    """MurmurHash3's fmix32 on uint32."""
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _gumbel_noise(key, token):  # type: ignore[no-untyped-def]
    bits = _mix(_mix(token.to(tl.uint32) * 0x9E3779B9) ^ key)
    v = tl.minimum((bits.to(tl.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    # log1p(-v) to full relative precision, from log alone (Kahan): the rounding of 1 - v cancels in the quotient.
    u = 1.0 - v
    log1p = tl.where(u == 1.0, -v, tl.log(u) * (v / tl.where(u == 1.0, 1.0, 1.0 - u)))
    return -tl.log(-log1p)


@triton.jit
def _argmax_kernel(  # type: ignore[no-untyped-def]
    logits, logits_stride, temperature, seed, choice, position, best_values, best_ids,
    vocab_size, split_size, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (n, s) finds the best of row n's ids s * split_size and up; ties go to the lowest id."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    start = split * split_size
    end = tl.minimum(start + split_size, vocab_size)
    heat = tl.load(temperature + row)
    random = heat > 0
    divisor = tl.where(random, heat, 1.0)
    wide_seed = tl.load(seed + row)
    key = _mix(wide_seed.to(tl.uint32) ^ 0x9E3779B9)
    key = _mix(key ^ (wide_seed >> 32).to(tl.uint32))
    key = _mix(key ^ tl.load(choice + row).to(tl.uint32))
    key = _mix(key ^ tl.load(position + row).to(tl.uint32))

    # Each lane keeps its own best, so that the loop has no reduction.
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = start + tl.arange(0, BLOCK)
    for tile in range(start, end, BLOCK):
        token = tile + tl.arange(0, BLOCK)
        value = tl.load(logits + row * logits_stride + token, mask=token < end, other=float("-inf"))
        if random:
            value = tl.div_rn(value, divisor) + _gumbel_noise(key, token)
        # False for NaN: it never wins, and the id stays in range whatever the logits are.
        better = value > best
        best = tl.where(better, value, best)
        best_id = tl.where(better, token, best_id)
    top = tl.max(best, 0)
    index = row * tl.num_programs(1) + split
    tl.store(best_values + index, top)
    tl.store(best_ids + index, tl.min(tl.where(best == top, best_id, _NO_ID), 0).to(tl.int64))


@triton.jit(do_not_specialize=["num_splits"])
def _reduce_kernel(  # type: ignore[no-untyped-def]
    best_values, best_ids, out, num_splits, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    split = tl.arange(0, BLOCK)
    here = split < num_splits
    value = tl.load(best_values + row * num_splits + split, mask=here, other=float("-inf"))
    index = tl.load(best_ids + row * num_splits + split, mask=here, other=_NO_ID)
    tl.store(out + row, tl.min(tl.where(value == tl.max(value, 0), index, _NO_ID), 0))


def gumbel_argmax_triton(logits: Tensor, temperature: Tensor, seed: Tensor, choice: Tensor, position: Tensor) -> Tensor:
    num_rows, vocab_size = logits.shape
    if logits.stride(1) != 1 or not all(t.is_contiguous() for t in (temperature, seed, choice, position)):
        raise ValueError("the kernel reads contiguous rows and parameters")
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return out
    tiles = triton.cdiv(vocab_size, _BLOCK)
    split_size = triton.cdiv(tiles, min(tiles, _MAX_SPLITS, triton.cdiv(_TARGET_PROGRAMS, num_rows))) * _BLOCK
    num_splits = triton.cdiv(vocab_size, split_size)
    values = torch.empty(num_rows, num_splits, dtype=torch.float32, device=logits.device)
    ids = out if num_splits == 1 else torch.empty(num_rows, num_splits, dtype=torch.int64, device=logits.device)
    _argmax_kernel[(num_rows, num_splits)](
        logits, logits.stride(0), temperature, seed, choice, position, values, ids,
        vocab_size, split_size, BLOCK=_BLOCK,
    )  # fmt: skip
    if num_splits > 1:
        _reduce_kernel[(num_rows,)](values, ids, out, num_splits, BLOCK=_MAX_SPLITS)
    return out
