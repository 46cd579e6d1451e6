"""The Triton side of `runner.kernels.cache_write`: keys and values of a layer in one launch."""

from __future__ import annotations

from torch import Tensor

from runner.kernels._triton import tl, triton

_MAX_BLOCK = 2048


@triton.jit
def only_finite(values, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """As DTYPE, with 0 for what isn't finite there: see `cache_write.only_finite`."""
    rounded = values.to(DTYPE).to(tl.float32)
    return tl.where(tl.abs(rounded) < float("inf"), rounded, 0.0).to(DTYPE)


@triton.jit
def _write_kernel(  # type: ignore[no-untyped-def]
    key, key_row_stride, key_head_stride, key_dim_stride, value, value_row_stride, value_head_stride, value_dim_stride,
    key_cache, value_cache, cache_index,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HEADS * HEAD_DIM
    head, dim = column // HEAD_DIM, column % HEAD_DIM
    target = tl.load(cache_index + row) * (HEADS * HEAD_DIM) + column
    key_values = tl.load(key + row * key_row_stride + head * key_head_stride + dim * key_dim_stride, mask=inside)
    value_values = tl.load(
        value + row * value_row_stride + head * value_head_stride + dim * value_dim_stride, mask=inside
    )
    tl.store(key_cache + target, only_finite(key_values, key_cache.dtype.element_ty), mask=inside)
    tl.store(value_cache + target, only_finite(value_values, value_cache.dtype.element_ty), mask=inside)


def write_kv_triton(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, cache_index: Tensor) -> None:
    num_rows, heads, head_dim = key.shape
    if num_rows == 0:
        return
    block = min(triton.next_power_of_2(heads * head_dim), _MAX_BLOCK)
    _write_kernel[(num_rows, triton.cdiv(heads * head_dim, block))](
        key, *key.stride(), value, *value.stride(), key_cache, value_cache, cache_index,
        HEADS=heads, HEAD_DIM=head_dim, BLOCK=block, num_warps=4 if block >= 512 else 1,
    )  # fmt: skip
