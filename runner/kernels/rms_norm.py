"""RMSNorm, alone and together with the residual addition before it.

Called by `runner.decoder` and, for the norms of heads, by `runner.kernels.rope`. Results are those of transformers'
modules, rounded at the same places.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
    """x / sqrt(mean(x²) + eps), scaled: by `weight` after rounding to the dtype (Llama's kind), or by 1 + `weight`
    before it (Gemma's, `unit_offset`).

    Args:
        x: [T, hidden], rows of any stride; on CUDA also the partial sums of `kernels.split_k`, [parts, T, hidden]
            float32, which are added up and rounded first.
        weight: [hidden], of the rows' dtype and device.

    Returns:
        [T, hidden], of the weight's dtype.
    """
    if x.is_cuda:
        from runner.kernels.rms_norm_triton import rms_norm_triton

        return rms_norm_triton(x, weight, eps, unit_offset)
    from runner.kernels.rms_norm_cpu import rms_norm_cpu

    return rms_norm_cpu(x, weight, eps, unit_offset)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * (1.0 + weight.float())).to(x.dtype) if unit_offset else weight * normed.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float,
                 unit_offset: bool = False) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(rms_norm(s), s) for s = x + residual in x's dtype: what a decoder layer does between attention and MLP, and
    between two layers. `x`, `residual`: as `rms_norm` takes them, the residual never in parts."""
    if x.is_cuda:
        from runner.kernels.rms_norm_triton import add_rms_norm_triton

        return add_rms_norm_triton(x, residual, weight, eps, unit_offset)
    from runner.kernels.rms_norm_cpu import add_rms_norm_cpu

    return add_rms_norm_cpu(x, residual, weight, eps, unit_offset)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float,
                           unit_offset: bool = False) -> tuple[Tensor, Tensor]:  # fmt: skip
    total = x + residual
    return rms_norm_reference(total, weight, eps, unit_offset), total
