"""Linear layers for a step of some rows, up to 64: the weights are read by as many programs as the device runs at once.

Called by `runner.decoder`. Such a layer takes as long as reading its weights does, if enough programs read them. Where
outputs are too few to go round, the inputs are split as well, and what comes out are partial sums: whatever reads them
next (a norm, the rotation) adds them up, so that no launch and no waiting in between is spent on that.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from runner.kernels.activation import Activation, gated_reference

MAX_ROWS = 64
MAX_WEIGHTS = 128 << 20
"""Layers of up to 117 million weights were measured on an H200: faster than cuBLAS and an activation behind it."""
MAX_NARROW_WEIGHTS = 8 << 20
"""Where shared memory has no room for wide tiles."""
_ROOMY = ((8, 0), (9, 0), (10, 0), (10, 3))
"""Compute capabilities with 160 KiB of shared memory for a program, or more; the others between them have 99."""
BLOCK_K = 64


def split_k_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """linear(x) in parts: the sum over the first dimension, rounded to x's dtype, is the layer's output.

    Args:
        x: [T, in], contiguous, T at most MAX_ROWS, bfloat16 or float16, on CUDA; `in` a multiple of BLOCK_K.
        weight: [N, in], contiguous. bias: [N].

    Returns:
        [parts, T, N] float32; or, where one part suffices, [T, N] of x's dtype.
    """
    from runner.kernels.split_k_triton import split_k_linear_triton

    return split_k_linear_triton(x, weight, bias)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
    """linear(x) whose first half of outputs gates the second (see `kernels.activation`): [T, N // 2], of x's dtype.
    Arguments as of `split_k_linear`."""
    from runner.kernels.split_k_triton import gated_linear_triton

    return gated_linear_triton(x, weight, bias, activation)


def gated_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
    return gated_reference(linear(x, weight, bias), activation)


def takes(x: Tensor, layer: nn.Module) -> bool:
    """Whether these rows and this layer are for this file."""
    if not x.is_cuda or len(x) > MAX_ROWS or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    largest = MAX_WEIGHTS if has_room(x.device) else MAX_NARROW_WEIGHTS
    return type(layer) is nn.Linear and layer.weight.numel() <= largest and layer.in_features % BLOCK_K == 0


@functools.cache
def has_room(device: torch.device) -> bool:
    """Whether a program may have the shared memory that wide tiles take."""
    return torch.cuda.get_device_capability(device) in _ROOMY
