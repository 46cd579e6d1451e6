"""The Triton side of `runner.kernels.rms_norm`: a row is read once and stays in registers."""

from __future__ import annotations

import torch
from torch import Tensor

from runner.kernels._triton import dependent_launch, tl, triton


@triton.jit
def _norm_kernel(  # type: ignore[no-untyped-def]
    x, x_stride, part_stride, residual, residual_stride, weight, total, out, eps,
    PARTS: tl.constexpr, ADD: tl.constexpr, UNIT_OFFSET: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    # The weight doesn't depend on the row: asked for first, it arrives with it.
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    dtype = out.dtype.element_ty
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if PARTS:
        for part in tl.static_range(1, PARTS):
            value += tl.load(x + part * part_stride + row * x_stride + column, mask=inside, other=0.0)
        value = value.to(dtype).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        # What is normed is what is handed on: the sum as rounded.
        rounded = value.to(dtype)
        tl.store(total + row * HIDDEN + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, 0) / HIDDEN + eps)
    result = normed * (1.0 + scale) if UNIT_OFFSET else normed.to(dtype).to(tl.float32) * scale
    tl.store(out + row * HIDDEN + column, result.to(dtype), mask=inside)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
    out = torch.empty(x.shape[-2:], dtype=weight.dtype, device=x.device)
    _launch(x, out, weight, out, out, eps, unit_offset, add=False)
    return out


def add_rms_norm_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float,
                        unit_offset: bool = False) -> tuple[Tensor, Tensor]:  # fmt: skip
    out, total = (torch.empty(residual.shape, dtype=weight.dtype, device=x.device) for _ in range(2))
    _launch(x, residual, weight, total, out, eps, unit_offset, add=True)
    return out, total


def _launch(x: Tensor, residual: Tensor, weight: Tensor, total: Tensor, out: Tensor, eps: float, unit_offset: bool,
            add: bool) -> None:  # fmt: skip
    num_rows, hidden = x.shape[-2:]
    if num_rows == 0:
        return
    parts = len(x) if x.dim() == 3 else 0
    block = triton.next_power_of_2(hidden)
    _norm_kernel[(num_rows,)](
        x, x.stride(-2), x.stride(0) if parts else 0, residual, residual.stride(0), weight, total, out, float(eps),
        PARTS=parts, ADD=add, UNIT_OFFSET=unit_offset, HIDDEN=hidden, BLOCK=block,
        num_warps=min(max(block // 256, 1), 16), **dependent_launch(x),
    )  # fmt: skip
