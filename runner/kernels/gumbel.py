"""Sampling noise and the choice itself: greedy and Gumbel-max in one pass.

Called by `runner.sampler`. The noise at (seed, choice, position, token) is a hash of these four and of nothing else, so
a request draws the same tokens whatever the batch, the slot, the chunking or a preemption. Gumbel-max: the argmax of
log p + G with G standard Gumbel is distributed as p (Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030). The mixer is
the 32-bit finaliser of MurmurHash3 (Appleby, public domain); a row's key is two words of it, of which one enters at its
start and one half-way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runner.kernels.filters import Floors, apply_floors
from runner.sampling_state import SamplingState

_M32 = 0xFFFFFFFF
_C1, _C2 = 0x85EBCA6B, 0xC2B2AE35
_GOLDEN = 0x9E3779B9


def gumbel_argmax(logits: Tensor, slot: Tensor, sampling: SamplingState, length: Tensor, floors: Floors | None = None,
                  out: Tensor | None = None) -> Tensor:  # fmt: skip
    """The sampled token of each row. On CUDA two launches at most, which depend on shapes alone.

    Args:
        logits: [N, vocab], any float dtype, not yet divided by the temperature.
        slot: [N] int32 or int64: whose parameters row i takes. Padding may have any slot, and gets any token.
        sampling: temperature (0 is greedy, ties going to the lowest id), choice and seed.
        length: [S] int32, by slot: the position that the token will take.
        floors: what is left of each row; None for all of it.
        out: [>= N] int64, written below N.

    Returns:
        [N] int64; `out[:N]` where that is given.
    """
    if logits.is_cuda:
        from runner.kernels.gumbel_triton import gumbel_argmax_triton

        return gumbel_argmax_triton(logits, slot, sampling, length, floors, out)
    if floors is None and not bool((sampling.floats[0, slot.long()] > 0).any()):
        from runner.kernels.argmax_cpu import argmax_cpu

        tokens = argmax_cpu(logits)
        return tokens if out is None else out[: len(tokens)].copy_(tokens)
    return gumbel_argmax_reference(logits, slot, sampling, length, floors, out)


def gumbel_argmax_reference(logits: Tensor, slot: Tensor, sampling: SamplingState, length: Tensor,
                            floors: Floors | None = None, out: Tensor | None = None) -> Tensor:  # fmt: skip
    slot = slot.long()
    temperature = sampling.floats[0, slot]
    logits = logits.float()
    if floors is not None:
        logits = apply_floors(logits, floors)
    tokens = logits.argmax(-1)
    random = (temperature > 0).nonzero()[:, 0]
    if len(random):
        _, choice, low, high = sampling.ints[:, slot[random]].unbind(0)
        scores = gumbel_noise(low, high, choice, length[slot[random]], logits.shape[1])
        scores.add_((logits if len(random) == len(logits) else logits[random]) / temperature[random, None])
        tokens[random] = scores.argmax(-1)
    if out is None:
        return tokens
    return out[: len(tokens)].copy_(tokens)


def gumbel_noise(seed_low: Tensor, seed_high: Tensor, choice: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """[N, vocab] float32 standard Gumbel noise, all of it finite. All arguments [N], int32 or int64."""
    first, second = _row_keys(seed_low.long(), seed_high.long(), choice.long(), position.long())
    # In place and in int32, which wraps like the uint32 that is meant; `>>` is arithmetic, so its copies of the sign
    # are masked away.
    token = torch.arange(vocab_size, device=seed_low.device, dtype=torch.int32)
    x = token * _signed(_GOLDEN) + first[:, None]
    shifted = x >> 16
    x.bitwise_xor_(shifted.bitwise_and_(0xFFFF)).mul_(_signed(_C1))
    torch.bitwise_right_shift(x, 13, out=shifted)
    x.bitwise_xor_(shifted.bitwise_and_(0x7FFFF)).bitwise_xor_(second[:, None]).mul_(_signed(_C2))
    torch.bitwise_right_shift(x, 16, out=shifted)
    x.bitwise_xor_(shifted.bitwise_and_(0xFFFF))
    # v in (0, 1); -log1p(-v) keeps full relative precision near 0, where the largest noise, the tail, comes from.
    v = _as_unsigned(x).add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return v.neg_().log1p_().neg_().log_().neg_()


def _row_keys(low: Tensor, high: Tensor, choice: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Two [N] int32 words: the same four numbers, mixed in two orders."""
    first = second = torch.full_like(low, _GOLDEN)
    for word in (low, high, choice, position):
        first = _mix(first ^ (word & _M32))
    for word in (position, choice, high, low):
        second = _mix(second ^ (word & _M32))
    return first.int(), second.int()


def _mix(x: Tensor) -> Tensor:
    """MurmurHash3's fmix32 on int64 tensors that hold unsigned 32-bit values."""
    x = x ^ (x >> 16)
    x = (x * _C1) & _M32
    x = x ^ (x >> 13)
    x = (x * _C2) & _M32
    return x ^ (x >> 16)


def _as_unsigned(x: Tensor) -> Tensor:
    """int32 bits of unsigned numbers to the nearest float32."""
    return (x.long() & _M32).float()


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
