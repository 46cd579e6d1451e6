"""Linear layers for a step of one or two rows, with what stands around them: residual addition and norm before, the
gated activation behind.

Called by `runner.decoder`. With so few rows a layer's time is that of reading its weights, and what is left is the time
between launches: so everything that can be computed beside the weights is. The norm's factor is one number a row and is
applied to the sums, which lets the weights stream before it is known.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from runner.kernels.activation import Activation, gated_reference
from runner.kernels.rms_norm import rms_norm_reference

MAX_ROWS = 2
MAX_WEIGHTS = 64 << 20
"""Of a layer for two rows. In larger ones cuBLAS, which reads weights a little faster, wins."""


def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, residual: Tensor | None = None,
                    norm_weight: Tensor | None = None, eps: float = 0.0, unit_offset: bool = False,
                    activation: Activation | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, total): total = x + residual in x's dtype (x itself without one); out = linear(rms_norm(total)), the norm
    left out where there is no `norm_weight`.

    Args:
        x, residual: [T, in], contiguous, T at most MAX_ROWS, bfloat16 or float16, on CUDA.
        weight: [N, in], contiguous. bias: [N].
        activation: the first half of the outputs gates the second (see `kernels.activation`); out then has N // 2
            columns.

    Returns:
        [T, N] (or [T, N // 2]) and [T, in], of x's dtype.
    """
    from runner.kernels.few_rows_triton import few_rows_linear_triton

    return few_rows_linear_triton(x, weight, bias, residual, norm_weight, eps, unit_offset, activation)


def few_rows_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None,
                              norm_weight: Tensor | None = None, eps: float = 0.0, unit_offset: bool = False,
                              activation: Activation | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    total = x if residual is None else x + residual
    normed = total if norm_weight is None else rms_norm_reference(total, norm_weight, eps, unit_offset)
    out = linear(normed, weight, bias)
    return (out if activation is None else gated_reference(out, activation)), total


def takes(x: Tensor, layer: nn.Module) -> bool:
    """Whether these rows and this layer are for this file."""
    if not x.is_cuda or len(x) > MAX_ROWS or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    return type(layer) is nn.Linear and (len(x) == 1 or layer.weight.numel() <= MAX_WEIGHTS)
