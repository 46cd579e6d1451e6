"""The Triton side of `runner.kernels.logprobs`: one launch over tiles of the vocabulary, one that joins a row's tiles.

A tile stays in registers while its best tokens are taken out one by one; the few of all tiles are then the candidates
of the second launch. A candidate is one int64 (the logit as an integer in the same order, above the id's complement),
so that one maximum finds the best logit and among equals the lowest id.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runner.kernels._triton import tl, triton
from runner.kernels.logprobs import Logprobs

MAX_TOP = 64
_TOPS = (8, 20, MAX_TOP)
"""Room for candidates, so that not every `top` compiles anew."""
_BLOCK = 4096
_ID_BITS = tl.constexpr(2**31 - 1)
_TAKEN = tl.constexpr(-(2**63))


@triton.jit
def _packed(logit, token):  # type: ignore[no-untyped-def]
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)  # -0.0 like 0.0
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (key.to(tl.int64) << 32) | (token ^ _ID_BITS).to(tl.int64)


@triton.jit
def _logit_of(packed):  # type: ignore[no-untyped-def]
    key = (packed >> 32).to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["top"])
def _tile_kernel(  # type: ignore[no-untyped-def]
    logits, logits_stride, tokens, peaks, sums, above, candidates, vocab_size, top, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (n, t): of tile t of row n the highest logit, the sum of exponentials relative to it, how many logits are
    above the row's token's, and the `top` best."""
    row = tl.program_id(0).to(tl.int64)
    place = row * tl.num_programs(1) + tl.program_id(1)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    logits += row * logits_stride
    logit = tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32)
    chosen = tl.load(logits + tl.load(tokens + row)).to(tl.float32)
    peak = tl.max(logit, 0)
    # Nothing is ever relative to -inf.
    base = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(peaks + place, peak)
    tl.store(sums + place, tl.sum(tl.exp(logit - base), 0))
    tl.store(above + place, tl.sum((logit > chosen).to(tl.int32), 0))
    packed = tl.where(inside, _packed(logit, token), _TAKEN)
    for i in range(top):
        best = tl.max(packed, 0)
        tl.store(candidates + place * top + i, best)
        packed = tl.where(packed == best, _TAKEN, packed)


@triton.jit(do_not_specialize=["num_tiles", "top"])
def _join_kernel(  # type: ignore[no-untyped-def]
    logits, logits_stride, tokens, peaks, sums, above, candidates, logprobs, ranks, top_tokens, top_logprobs,
    num_tiles, top, TILES: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    inside = tile < num_tiles
    tile_peak = tl.load(peaks + row * num_tiles + tile, mask=inside, other=float("-inf"))
    tile_sum = tl.load(sums + row * num_tiles + tile, mask=inside, other=0.0)
    peak = tl.max(tile_peak, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    total = base + tl.log(tl.sum(tile_sum * tl.exp(tile_peak - base), 0))
    chosen = tl.load(logits + row * logits_stride + tl.load(tokens + row)).to(tl.float32)
    tl.store(logprobs + row, chosen - total)
    higher = tl.sum(tl.load(above + row * num_tiles + tile, mask=inside, other=0), 0)
    tl.store(ranks + row, higher.to(tl.int64) + 1)
    place = tl.arange(0, CANDIDATES)
    packed = tl.load(candidates + row * num_tiles * top + place, mask=place < num_tiles * top, other=_TAKEN)
    for i in range(top):
        best = tl.max(packed, 0)
        tl.store(top_tokens + row * top + i, (best & _ID_BITS) ^ _ID_BITS)
        tl.store(top_logprobs + row * top + i, _logit_of(best) - total)
        packed = tl.where(packed == best, _TAKEN, packed)


def logprobs_of_triton(logits: Tensor, tokens: Tensor, top: int) -> Logprobs:
    num_rows, vocab_size = logits.shape
    if not 0 <= top <= min(MAX_TOP, vocab_size):
        raise ValueError(f"the {top} best tokens were asked for; {min(MAX_TOP, vocab_size)} can be had")
    if logits.stride(1) != 1 or not tokens.is_contiguous():
        raise ValueError("the kernels read contiguous rows and tokens")

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    result = Logprobs(
        empty(num_rows, dtype=torch.float32),
        empty(num_rows, dtype=torch.int64),
        empty(num_rows, top, dtype=torch.int64),
        empty(num_rows, top, dtype=torch.float32),
    )
    if num_rows == 0:
        return result
    num_tiles = triton.cdiv(vocab_size, _BLOCK)
    room = num_tiles * next(room for room in _TOPS if room >= top)
    peaks, sums = (empty(num_rows, num_tiles, dtype=torch.float32) for _ in range(2))
    above = empty(num_rows, num_tiles, dtype=torch.int32)
    candidates = empty(num_rows, num_tiles, top, dtype=torch.int64)
    _tile_kernel[(num_rows, num_tiles)](
        logits, logits.stride(0), tokens, peaks, sums, above, candidates, vocab_size, top, BLOCK=_BLOCK, num_warps=8
    )
    _join_kernel[(num_rows,)](
        logits, logits.stride(0), tokens, peaks, sums, above, candidates,
        result.logprob, result.rank, result.top_tokens, result.top_logprobs, num_tiles, top,
        TILES=triton.next_power_of_2(num_tiles), CANDIDATES=triton.next_power_of_2(room),
    )  # fmt: skip
    return result
