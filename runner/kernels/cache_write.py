"""Writes a layer's new keys and values into the paged cache.

Called by `runner.attention.backend.attend`, before the attention itself, where a model runs as transformers wrote it
(fused layers write with `kernels.rope`).
"""

from __future__ import annotations

from torch import Tensor


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, cache_index: Tensor) -> None:
    """Row cache_index[t] of each cache becomes row t.

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
    key_cache.view(-1, *key.shape[1:])[cache_index] = key
    value_cache.view(-1, *value.shape[1:])[cache_index] = value
