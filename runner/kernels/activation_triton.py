"""The Triton side of `runner.kernels.activation`."""

from __future__ import annotations

import torch
from torch import Tensor

from runner.kernels._triton import dependent_launch, tl, triton
from runner.kernels.activation import Activation

_BLOCK = 1024
_LOG2_E = tl.constexpr(1.4426950408889634)
_SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)


@triton.jit
def activated(gate, SILU: tl.constexpr):  # type: ignore[no-untyped-def]
    """silu, or gelu_tanh, of fp32 values: x * sigmoid(x), and 0.5 x (1 + tanh(y)) = x * sigmoid(2 y). An infinite
    exponential gives the right limit."""
    inner = gate if SILU else 2 * _SQRT_2_OVER_PI * (gate + 0.044715 * gate * gate * gate)
    return gate / (1 + tl.exp2(-inner * _LOG2_E))


@triton.jit
def _gated_kernel(  # type: ignore[no-untyped-def]
    gate_up,
    row_stride,
    out,
    INTERMEDIATE: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < INTERMEDIATE
    start = gate_up + row * row_stride
    gate = tl.load(start + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + INTERMEDIATE + column, mask=inside, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    tl.store(
        out + row * INTERMEDIATE + column, (activated(gate, SILU).to(dtype).to(tl.float32) * up).to(dtype), mask=inside
    )


def gated_triton(gate_up: Tensor, activation: Activation) -> Tensor:
    num_rows, columns = gate_up.shape
    intermediate = columns // 2
    out = torch.empty(num_rows, intermediate, dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        _gated_kernel[(num_rows, triton.cdiv(intermediate, _BLOCK))](
            gate_up,
            gate_up.stride(0),
            out,
            INTERMEDIATE=intermediate,
            SILU=activation == "silu",
            BLOCK=_BLOCK,
            **dependent_launch(gate_up),
        )
    return out
