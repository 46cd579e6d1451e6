"""The Triton side of `runner.kernels.split_k`: a program multiplies all rows with a tile of the weights' rows, over all
inputs or some of them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from runner.kernels._triton import dependent_launch, tl, triton
from runner.kernels.activation import Activation
from runner.kernels.activation_triton import activated
from runner.kernels.split_k import BLOCK_K, has_room

_ROWS = 64
"""Rows of a tile, most of them padding for a small step: from 64 on the tensor cores take both factors from shared
memory, and that is faster than multiplying less by the older instruction."""
_PROGRAMS = 132
"""One on each of an H200's multiprocessors, as measured: two have to share what goes round."""
_MAX_PARTS = 8
_LEAST_TILES = 4
"""Of BLOCK_K inputs that a program has: fewer would be all beginning and no middle."""
_LARGE = 8 << 20
"""Weights from which on wider tiles are faster."""
_STAGES, _GATED_STAGES = {32: 4, 64: 5}, {32: 6, 64: 6, 128: 4}
"""By a tile's outputs: 100 to 200 KiB of shared memory."""


@triton.jit
def _split_k_kernel(  # type: ignore[no-untyped-def]
    x, weight, bias, out, num_rows, num_outputs,
    K: tl.constexpr, PART: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, p): outputs i * BLOCK_N and up of every row, over inputs p * PART to (p + 1) * PART. GATED: the
    partner of weight row n is row num_outputs + n."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(1)
    first, last = part * PART, tl.minimum(part * PART + PART, K)
    here = n < num_outputs
    gate_rows = weight + n.to(tl.int64) * K
    up_rows = weight + (n + num_outputs).to(tl.int64) * K
    m = tl.arange(0, BLOCK_M)
    rows = (m < num_rows)[:, None]
    k = first + tl.arange(0, BLOCK_K)
    # Weights wait for nobody: the first tile comes while the kernel in front finishes.
    early = tl.load(gate_rows[None, :] + k[:, None], mask=here[None, :], other=0.0)
    if GATED:
        early_up = tl.load(up_rows[None, :] + k[:, None], mask=here[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    values = tl.load(x + m[:, None] * K + k[None, :], mask=rows, other=0.0)
    acc = tl.dot(values, early)
    up = acc
    if GATED:
        up = tl.dot(values, early_up)
    for offset in tl.range(BLOCK_K, last - first, BLOCK_K, num_stages=STAGES):
        tile = tl.load(gate_rows[None, :] + (offset + k)[:, None], mask=here[None, :], other=0.0)
        values = tl.load(x + m[:, None] * K + (offset + k)[None, :], mask=rows, other=0.0)
        acc = tl.dot(values, tile, acc)
        if GATED:
            tile = tl.load(up_rows[None, :] + (offset + k)[:, None], mask=here[None, :], other=0.0)
            up = tl.dot(values, tile, up)
    if HAS_BIAS:
        once = here & (part == 0)
        acc += tl.load(bias + n, mask=once, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias + num_outputs + n, mask=once, other=0.0).to(tl.float32)[None, :]
    dtype = out.dtype.element_ty
    if GATED:
        gate = acc.to(dtype).to(tl.float32)
        acc = activated(gate, SILU).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
    target = out + (part * num_rows + m).to(tl.int64)[:, None] * num_outputs + n[None, :]
    tl.store(target, acc.to(dtype), mask=rows & here[None, :])


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, parts: int,
            activation: Activation | None) -> None:  # fmt: skip
    num_rows, k = x.shape
    num_outputs, gated = out.shape[-1], activation is not None
    part = triton.cdiv(k, BLOCK_K * parts) * BLOCK_K
    block_n = _gated_block_n(num_outputs, x) if gated else _block_n(weight)
    block_k, stages = (64, _GATED_STAGES[block_n]) if gated else (128, _STAGES[block_n])
    _split_k_kernel[(triton.cdiv(num_outputs, block_n), parts)](
        x, weight, x if bias is None else bias, out, num_rows, num_outputs,
        K=k, PART=part, GATED=gated, SILU=activation == "silu", HAS_BIAS=bias is not None,
        BLOCK_M=max(triton.next_power_of_2(num_rows), _ROWS), BLOCK_N=block_n,
        BLOCK_K=math.gcd(block_k, part, k % part), STAGES=stages, num_warps=4, **dependent_launch(x),
    )  # fmt: skip


def _block_n(weight: Tensor) -> int:
    return 32 if weight.numel() <= _LARGE else 64


def _gated_block_n(num_outputs: int, x: Tensor) -> int:
    """Inputs are never split: the tiles are so wide that one wave takes them all, where there is room for such."""
    if x.is_cuda and not has_room(x.device):
        return 32
    return next((n for n in (32, 64) if num_outputs <= n * _PROGRAMS), 128)


def split_k_linear_triton(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    num_outputs, k = weight.shape
    parts, tiles = 1, triton.cdiv(num_outputs, _block_n(weight))
    while parts < _MAX_PARTS and 2 * parts * tiles <= _PROGRAMS and k >= 2 * parts * _LEAST_TILES * BLOCK_K:
        parts *= 2
    parts = triton.cdiv(k, triton.cdiv(k, BLOCK_K * parts) * BLOCK_K)  # none is empty
    if parts == 1:
        out = torch.empty(len(x), num_outputs, dtype=x.dtype, device=x.device)
    else:
        out = torch.empty(parts, len(x), num_outputs, dtype=torch.float32, device=x.device)
    _launch(x, weight, bias, out, parts, None)
    return out


def gated_linear_triton(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
    out = torch.empty(len(x), len(weight) // 2, dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, out, 1, activation)
    return out
