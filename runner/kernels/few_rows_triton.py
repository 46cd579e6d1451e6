"""The Triton side of `runner.kernels.few_rows`: a program computes a few outputs of every row.

Launched early where the device can (`dependent_launch`), a program asks for its first weights before it
waits for the kernel whose output it reads: they arrive while that one finishes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runner.kernels._triton import dependent_launch, tl, triton
from runner.kernels.activation import Activation
from runner.kernels.activation_triton import activated


@triton.jit
def _row_tile(  # type: ignore[no-untyped-def]
    x, residual, norm_weight, total, k, inside, stores,
    ADD: tl.constexpr, NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr,
):  # fmt: skip
    """A tile of one row in fp32: what is multiplied (its norm's factor is still missing), and its squares."""
    value = tl.load(x + k, mask=inside, other=0.0)
    if ADD:
        # What is normed is what is handed on: the sum as rounded.
        value = (value.to(tl.float32) + tl.load(residual + k, mask=inside, other=0.0).to(tl.float32)).to(value.dtype)
        tl.store(total + k, value, mask=inside & stores)
    wide = value.to(tl.float32)
    scaled = wide
    if NORM:
        scale = tl.load(norm_weight + k, mask=inside, other=0.0).to(tl.float32)
        scaled = wide * (1.0 + scale) if UNIT_OFFSET else wide * scale
    return scaled, wide * wide


@triton.jit
def _store_row(  # type: ignore[no-untyped-def]
    acc, up, squares, bias, out, n, here, num_outputs, eps,
    K: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    dtype = out.dtype.element_ty
    factor = tl.rsqrt(tl.sum(squares, 0) / K + eps) if NORM else 1.0
    result = tl.sum(acc, 1) * factor
    if HAS_BIAS:
        result += tl.load(bias + n, mask=here, other=0.0).to(tl.float32)
    if GATED:
        other = tl.sum(up, 1) * factor
        if HAS_BIAS:
            other += tl.load(bias + num_outputs + n, mask=here, other=0.0).to(tl.float32)
        gate = result.to(dtype).to(tl.float32)
        result = activated(gate, SILU).to(dtype).to(tl.float32) * other.to(dtype).to(tl.float32)
    tl.store(out + n, result.to(dtype), mask=here)


@triton.jit
def _few_rows_kernel(  # type: ignore[no-untyped-def]
    x, residual, norm_weight, weight, bias, out, total, num_outputs, eps,
    ROWS: tl.constexpr, K: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr,
    GATED: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Outputs p * BLOCK_N and up of one or two rows. GATED: the partner of weight row n is row num_outputs + n.
    EVEN: every tile is whole, and loads need no masks."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    here = n < num_outputs
    gate_rows = weight + n.to(tl.int64)[:, None] * K
    up_rows = weight + (n + num_outputs).to(tl.int64)[:, None] * K
    stores = tl.program_id(0) == 0
    acc_0 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc_1, up_0, up_1 = acc_0, acc_0, acc_0
    squares_0 = tl.zeros([BLOCK_K], tl.float32)
    squares_1 = squares_0
    for start in tl.static_range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = k < K
        if EVEN:
            tile = tl.load(gate_rows + k[None, :])
            if GATED:
                up_tile = tl.load(up_rows + k[None, :])
        else:
            mask = here[:, None] & inside[None, :]
            tile = tl.load(gate_rows + k[None, :], mask=mask, other=0.0)
            if GATED:
                up_tile = tl.load(up_rows + k[None, :], mask=mask, other=0.0)
        if PDL and start == 0:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        scaled, squares = _row_tile(x, residual, norm_weight, total, k, inside, stores, ADD, NORM, UNIT_OFFSET)
        acc_0 += tile.to(tl.float32) * scaled[None, :]
        squares_0 += squares
        if GATED:
            up_0 += up_tile.to(tl.float32) * scaled[None, :]
        if ROWS == 2:
            scaled, squares = _row_tile(
                x + K, residual + K, norm_weight, total + K, k, inside, stores, ADD, NORM, UNIT_OFFSET
            )
            acc_1 += tile.to(tl.float32) * scaled[None, :]
            squares_1 += squares
            if GATED:
                up_1 += up_tile.to(tl.float32) * scaled[None, :]
    _store_row(acc_0, up_0, squares_0, bias, out, n, here, num_outputs, eps, K, NORM, GATED, SILU, HAS_BIAS)
    if ROWS == 2:
        out += num_outputs
        _store_row(acc_1, up_1, squares_1, bias, out, n, here, num_outputs, eps, K, NORM, GATED, SILU, HAS_BIAS)


def _tile(rows: int, k: int, normed: bool, gated: bool) -> tuple[int, int, int]:
    """(BLOCK_K, BLOCK_N, num_warps), as measured on an H200 in a chain of a model's layers. The loop over the inputs is
    unrolled, so that long sums and second rows are paid for in registers."""
    whole = min(triton.next_power_of_2(k), 4096)
    if gated:
        return whole, 2, 8 if whole == 4096 and rows == 1 else 4
    if normed and k > 1024:
        return (1024, 4, 4) if rows == 1 else (whole, 4, 8)
    if not normed and k > 4096:
        return 2048, 2 if rows == 1 else 4, 4
    if not normed and k > 2048 and rows == 1:
        return 2048, 2, 4
    return min(whole, 1024), 8 if normed or rows == 1 else 4, 4


def few_rows_linear_triton(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
                           norm_weight: Tensor | None, eps: float, unit_offset: bool,
                           activation: Activation | None) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows, k = x.shape
    num_outputs = weight.shape[0] // (1 if activation is None else 2)
    out = torch.empty(rows, num_outputs, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(x)
    block_k, block_n, num_warps = _tile(rows, k, norm_weight is not None, activation is not None)
    _few_rows_kernel[(triton.cdiv(num_outputs, block_n),)](
        x, x if residual is None else residual, x if norm_weight is None else norm_weight, weight,
        x if bias is None else bias, out, total, num_outputs, float(eps),
        ROWS=rows, K=k, ADD=residual is not None, NORM=norm_weight is not None, UNIT_OFFSET=unit_offset,
        GATED=activation is not None, SILU=activation == "silu", HAS_BIAS=bias is not None,
        EVEN=k % block_k == 0 and num_outputs % block_n == 0, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=num_warps, **dependent_launch(x),
    )  # fmt: skip
    return out, total
