"""Writes a layer's new keys and values into the paged cache.

Called by `runner.attention.backend.attend`, before the attention itself, where a model runs as transformers wrote it
(fused layers write with `kernels.rope`).
"""

from __future__ import annotations

import torch
from torch import Tensor


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, cache_index: Tensor) -> None:
    """Row cache_index[t] of each cache becomes row t, with 0 for what isn't finite (see `only_finite`).

    Args:
        key, value: [T, num_kv_heads, head_dim], strided as they come (the model's are transposed views).
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim], contiguous, of the same dtype.
        cache_index: [T] int64. Rows of padding share one row of the dummy block: which of them it holds in the end is
            undefined.
    """
    if key.is_cuda:
        from runner.kernels.cache_write_triton import write_kv_triton

        write_kv_triton(key, value, key_cache, value_cache, cache_index)
    else:
        write_kv_reference(key, value, key_cache, value_cache, cache_index)


def write_kv_reference(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor,
                       cache_index: Tensor) -> None:  # fmt: skip
    key_cache.view(-1, *key.shape[1:])[cache_index] = only_finite(key)
    value_cache.view(-1, *value.shape[1:])[cache_index] = only_finite(value)


def only_finite(rows: Tensor) -> Tensor:
    """With 0 for NaN and infinity: what is cached has to be finite. A row that overflows (in float16 an embedding can
    see to that) would make NaN of rows before it in the same chunk, since a weight of zero hides neither, and their
    blocks may be another request's prefix."""
    return torch.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0)
