"""The Triton side of `runner.kernels.split_k`: a program multiplies all rows with a tile of the weights' rows, over all
inputs or some of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runner.kernels._triton import dependent_launch, tl, triton
from runner.kernels.activation import Activation
from runner.kernels.activation_triton import activated
from runner.kernels.split_k import BLOCK_K

_PROGRAMS = 256
"""About as many as an H200 runs at once."""
_MAX_PARTS = 8
_LEAST_TILES = 4
"""Of BLOCK_K inputs that a program has: fewer would be all beginning and no middle."""


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
    k = tl.arange(0, BLOCK_K)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = acc
    for start in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        tile = tl.load(gate_rows[None, :] + (start + k)[:, None], mask=here[None, :], other=0.0)
        values = tl.load(x + m[:, None] * K + (start + k)[None, :], mask=rows, other=0.0)
        acc = tl.dot(values, tile, acc)
        if GATED:
            tile = tl.load(up_rows[None, :] + (start + k)[:, None], mask=here[None, :], other=0.0)
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
    num_outputs, block_n = out.shape[-1], 64 if activation is None else 32
    part = triton.cdiv(k, BLOCK_K * parts) * BLOCK_K
    _split_k_kernel[(triton.cdiv(num_outputs, block_n), parts)](
        x, weight, x if bias is None else bias, out, num_rows, num_outputs,
        K=k, PART=part, GATED=activation is not None, SILU=activation == "silu", HAS_BIAS=bias is not None,
        BLOCK_M=max(triton.next_power_of_2(num_rows), 16), BLOCK_N=block_n, BLOCK_K=BLOCK_K,
        STAGES=5, num_warps=4, **dependent_launch(x),
    )  # fmt: skip


def split_k_linear_triton(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    num_outputs, k = weight.shape
    parts, tiles = 1, triton.cdiv(num_outputs, 64)
    while parts < _MAX_PARTS and 2 * parts * tiles <= _PROGRAMS and k >= 2 * parts * _LEAST_TILES * BLOCK_K:
        parts *= 2
    parts = triton.cdiv(k, triton.cdiv(k, BLOCK_K * parts) * BLOCK_K)  # none is empty
    out = torch.empty(parts, len(x), num_outputs, dtype=torch.float32, device=x.device)
    _launch(x, weight, bias, out, parts, None)
    return out


def gated_linear_triton(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
    out = torch.empty(len(x), len(weight) // 2, dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, out, 1, activation)
    return out
