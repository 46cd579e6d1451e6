"""Sampling noise and the choice itself: greedy and Gumbel-max in one pass.

Called by `runner.sampler`. The noise at (seed, choice, position, token) is a hash of these four and of nothing else, so
a request draws the same tokens whatever the batch, the slot, the chunking or a preemption. Gumbel-max: the argmax of
log p + G with G standard Gumbel is distributed as p (Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030). The mixer is
the 32-bit finaliser of MurmurHash3 (Appleby, public domain).
"""

from __future__ import annotations

import torch
from torch import Tensor

_M32 = 0xFFFFFFFF
_C1, _C2 = 0x85EBCA6B, 0xC2B2AE35
_GOLDEN = 0x9E3779B9


def gumbel_argmax(logits: Tensor, temperature: Tensor, seed: Tensor, choice: Tensor, position: Tensor) -> Tensor:
    """The sampled token of each row.

    Args:
        logits: [N, vocab] float32, already filtered (-inf where a token is ruled out), not yet divided by temperature.
        temperature: [N] float32; 0 is greedy, ties going to the lowest id.
        seed: [N] int64. choice: [N] int32. position: [N] int64, of the row that the token will take.

    Returns:
        [N] int64.
    """
    if logits.is_cuda:
        from runner.kernels.gumbel_triton import gumbel_argmax_triton

        return gumbel_argmax_triton(logits, temperature, seed, choice, position)
    return gumbel_argmax_reference(logits, temperature, seed, choice, position)


def gumbel_argmax_reference(logits: Tensor, temperature: Tensor, seed: Tensor, choice: Tensor,
                            position: Tensor) -> Tensor:  # fmt: skip
    random = temperature > 0
    if not bool(random.any()):
        return logits.argmax(-1)
    scaled = logits / torch.where(random, temperature, 1.0)[:, None]
    noise = gumbel_noise(seed, choice, position, logits.shape[1])
    return torch.where(random[:, None], scaled + noise, logits).argmax(-1)


def gumbel_noise(seed: Tensor, choice: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """[N, vocab] float32 standard Gumbel noise, all of it finite."""
    key = _mix((seed & _M32) ^ _GOLDEN)
    key = _mix(key ^ ((seed >> 32) & _M32))
    key = _mix(key ^ (choice.long() & _M32))
    key = _mix(key ^ (position & _M32))
    token = torch.arange(vocab_size, device=seed.device, dtype=torch.int64)
    bits = _mix(_mix(token * _GOLDEN & _M32) ^ key[:, None])
    # v in (0, 1); -log1p(-v) keeps full relative precision near 0, where the largest noise, the tail, comes from.
    v = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-v))


def _mix(x: Tensor) -> Tensor:
    """MurmurHash3's fmix32 on int64 tensors that hold unsigned 32-bit values."""
    x = x ^ (x >> 16)
    x = (x * _C1) & _M32
    x = x ^ (x >> 13)
    x = (x * _C2) & _M32
    return x ^ (x >> 16)
