"""The Triton side of `runner.kernels.rope`: each head is read once and written once, to where attention wants it."""

from __future__ import annotations

import torch
from torch import Tensor

from runner.kernels._triton import dependent_launch, tl, triton
from runner.kernels.cache_write_triton import only_finite
from runner.kernels.rope import HeadNorm, RopeTable

_MANY_ROWS = 128


@triton.jit
def _normed(  # type: ignore[no-untyped-def]
    x, factor, weight, inside, NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr, DTYPE: tl.constexpr
):
    """Part of the heads in fp32, scaled as `rms_norm` does it and rounded to the model's dtype."""
    if NORM:
        scale = tl.load(weight, mask=inside, other=0.0).to(tl.float32)[None, :]
        x = x * factor * (1.0 + scale) if UNIT_OFFSET else (x * factor).to(DTYPE).to(tl.float32) * scale
        x = x.to(DTYPE).to(tl.float32)
    return x


@triton.jit
def _load(source, part_stride, mask, PARTS: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Values in fp32; of partial sums the sum, rounded to the model's dtype."""
    values = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    if PARTS:
        for part in tl.static_range(1, PARTS):
            values += tl.load(source + part * part_stride, mask=mask, other=0.0)
        values = values.to(DTYPE).to(tl.float32)
    return values


@triton.jit
def _stored(values, CACHED: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    if CACHED:
        return only_finite(values, DTYPE)
    return values.to(DTYPE)


@triton.jit
def _rotate_heads(  # type: ignore[no-untyped-def]
    source, head_stride, part_stride, weight, eps, cos, sin, target, num_heads, first_head,
    PARTS: tl.constexpr, NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, CACHED: tl.constexpr,
):  # fmt: skip
    """`source` and `target` (the cache's, if CACHED) point at one row's heads. Dimension i turns with dimension
    ROTARY // 2 + i, so that a head is read as two halves, and the rest where it isn't all rotated."""
    HALF: tl.constexpr = ROTARY // 2
    DTYPE: tl.constexpr = target.dtype.element_ty
    head = first_head + tl.arange(0, BLOCK_H)
    half, rest = tl.arange(0, BLOCK_HALF), ROTARY + tl.arange(0, BLOCK_REST)
    in_half, in_rest = half < HALF, rest < HEAD_DIM
    here, rest_here = (head < num_heads)[:, None] & in_half[None, :], (head < num_heads)[:, None] & in_rest[None, :]
    heads = source + head[:, None] * head_stride
    first = _load(heads + half[None, :], part_stride, here, PARTS, DTYPE)
    second = _load(heads + HALF + half[None, :], part_stride, here, PARTS, DTYPE)
    squares = tl.sum(first * first + second * second, 1)
    if ROTARY < HEAD_DIM:
        others = _load(heads + rest[None, :], part_stride, rest_here, PARTS, DTYPE)
        squares += tl.sum(others * others, 1)
    factor = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
    first = _normed(first, factor, weight + half, in_half, NORM, UNIT_OFFSET, DTYPE)
    second = _normed(second, factor, weight + HALF + half, in_half, NORM, UNIT_OFFSET, DTYPE)
    c = tl.load(cos + half, mask=in_half, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + half, mask=in_half, other=0.0).to(tl.float32)[None, :]
    out = target + head[:, None] * HEAD_DIM
    tl.store(out + half[None, :], _stored(first * c - second * s, CACHED, DTYPE), mask=here)
    tl.store(out + HALF + half[None, :], _stored(second * c + first * s, CACHED, DTYPE), mask=here)
    if ROTARY < HEAD_DIM:
        others = _normed(others, factor, weight + rest, in_rest, NORM, UNIT_OFFSET, DTYPE)
        tl.store(out + rest[None, :], _stored(others, CACHED, DTYPE), mask=rest_here)


@triton.jit
def _rope_kernel(  # type: ignore[no-untyped-def]
    query, query_row_stride, query_head_stride, key, key_row_stride, key_head_stride,
    value, value_row_stride, value_head_stride, part_stride,
    query_weight, key_weight, eps, cos, sin, table_stride, positions, out, key_cache, value_cache, cache_index,
    PARTS: tl.constexpr, NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (t, p): some of row t's query heads, or some of its key heads and the value heads beside them."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    QUERY_PARTS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    turn = tl.load(positions + row).to(tl.int64) * table_stride
    cos_row, sin_row = cos + turn, sin + turn
    if part < QUERY_PARTS:
        _rotate_heads(
            query + row * query_row_stride, query_head_stride, part_stride, query_weight, eps, cos_row, sin_row,
            out + row * (HEADS * HEAD_DIM), HEADS, part * BLOCK_H,
            PARTS, NORM, UNIT_OFFSET, HEAD_DIM, ROTARY, BLOCK_H, BLOCK_HALF, BLOCK_REST, False,
        )  # fmt: skip
    else:
        first_head = (part - QUERY_PARTS) * BLOCK_H
        target = tl.load(cache_index + row) * (KV_HEADS * HEAD_DIM)
        _rotate_heads(
            key + row * key_row_stride, key_head_stride, part_stride, key_weight, eps, cos_row, sin_row,
            key_cache + target, KV_HEADS, first_head,
            PARTS, NORM, UNIT_OFFSET, HEAD_DIM, ROTARY, BLOCK_H, BLOCK_HALF, BLOCK_REST, True,
        )  # fmt: skip
        head = first_head + tl.arange(0, BLOCK_H)
        dim = tl.arange(0, BLOCK_D)
        here = (head < KV_HEADS)[:, None] & (dim < HEAD_DIM)[None, :]
        source = value + row * value_row_stride + head[:, None] * value_head_stride + dim[None, :]
        dtype = value_cache.dtype.element_ty
        values = only_finite(_load(source, part_stride, here, PARTS, dtype), dtype)
        tl.store(value_cache + target + head[:, None] * HEAD_DIM + dim[None, :], values, mask=here)


def rope_and_write_triton(query: Tensor, key: Tensor, value: Tensor, table: RopeTable, positions: Tensor,
                          key_cache: Tensor, value_cache: Tensor, cache_index: Tensor,
                          norm: HeadNorm | None = None) -> Tensor:  # fmt: skip
    num_rows, heads, head_dim = query.shape[-3:]
    kv_heads = key.shape[-2]
    parts = len(query) if query.dim() == 4 else 0
    if any(tensor.stride(-1) != 1 for tensor in (query, key, value)):
        raise ValueError("each head's values must lie side by side")
    if not (table.cos.is_contiguous() and table.sin.is_contiguous()):
        raise ValueError("the table must be contiguous")
    out = torch.empty(num_rows, heads, head_dim, dtype=key_cache.dtype, device=query.device)
    if num_rows == 0:
        return out
    rotary = table.cos.shape[1]
    # Heads a program: few where there are few rows to share out, many where each has enough to do (measured).
    block_h, num_warps = (8, 4) if num_rows < _MANY_ROWS else (16, 4)
    programs = triton.cdiv(heads, block_h) + triton.cdiv(kv_heads, block_h)
    _rope_kernel[(num_rows, programs)](
        query, *query.stride()[-3:-1], key, *key.stride()[-3:-1], value, *value.stride()[-3:-1],
        query.stride(0) if parts else 0,
        norm.query_weight if norm else out, norm.key_weight if norm else out, float(norm.eps) if norm else 0.0,
        table.cos, table.sin, rotary, positions, out, key_cache, value_cache, cache_index,
        PARTS=parts, NORM=norm is not None, UNIT_OFFSET=norm is not None and norm.unit_offset,
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, ROTARY=rotary, BLOCK_H=block_h,
        BLOCK_HALF=triton.next_power_of_2(rotary // 2), BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_REST=triton.next_power_of_2(max(head_dim - rotary, 1)),
        num_warps=num_warps, **dependent_launch(query),
    )  # fmt: skip
    return out
