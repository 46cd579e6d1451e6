"""Rotary embedding of queries and keys, their norms where a model has them, and the cache write, in one go.

Called by `runner.decoder` in every layer, in the place of q/k norm, `apply_rotary_pos_emb` and cache update.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runner.kernels.cache_write import write_kv_reference
from runner.kernels.rms_norm import rms_norm_reference


@dataclass(frozen=True)
class HeadNorm:
    """RMSNorm over each head's dimensions, as of Qwen3 (`unit_offset` False) or Gemma 3 (True)."""

    query_weight: Tensor
    """[head_dim]"""
    key_weight: Tensor
    eps: float
    unit_offset: bool


@dataclass(frozen=True)
class RopeTable:
    """Rotations by position, as transformers makes them: [max_model_len, rotary_dim] each, model dtype; the second half
    of a row repeats the first. Dimensions of a head from rotary_dim on (partial rotary) pass through."""

    cos: Tensor
    sin: Tensor


def rope_and_write(query: Tensor, key: Tensor, value: Tensor, table: RopeTable, positions: Tensor, key_cache: Tensor,
                   value_cache: Tensor, cache_index: Tensor, norm: HeadNorm | None = None) -> Tensor:  # fmt: skip
    """Row cache_index[t] of the caches becomes row t's rotated key and its value, with 0 for what isn't finite; the
    rotated queries are returned.

    Args:
        query: [T, num_heads, head_dim]. key, value: [T, num_kv_heads, head_dim]. Strided as they come. On CUDA also
            the partial sums of `kernels.split_k`, [parts, T, …] float32 views of one tensor.
        positions: [T] int64, below the table's length.
        key_cache, value_cache, cache_index: see `cache_write.write_kv`.
        norm: of queries and keys before their rotation.

    Returns:
        [T, num_heads, head_dim], contiguous.
    """
    if query.is_cuda:
        from runner.kernels.rope_triton import rope_and_write_triton

        return rope_and_write_triton(query, key, value, table, positions, key_cache, value_cache, cache_index, norm)
    from runner.kernels.rope_cpu import rope_and_write_cpu

    return rope_and_write_cpu(query, key, value, table, positions, key_cache, value_cache, cache_index, norm)


def rope_and_write_reference(query: Tensor, key: Tensor, value: Tensor, table: RopeTable, positions: Tensor,
                             key_cache: Tensor, value_cache: Tensor, cache_index: Tensor,
                             norm: HeadNorm | None = None) -> Tensor:  # fmt: skip
    cos, sin = table.cos[positions], table.sin[positions]
    if norm is not None:
        query = rms_norm_reference(query, norm.query_weight, norm.eps, norm.unit_offset)
        key = rms_norm_reference(key, norm.key_weight, norm.eps, norm.unit_offset)
    heads = torch.cat([query, key], dim=1)
    rotary = heads[..., : cos.shape[1]]
    first, second = rotary.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    rotated = rotary * cos[:, None] + turned * sin[:, None]
    if cos.shape[1] < heads.shape[2]:
        rotated = torch.cat([rotated, heads[..., cos.shape[1] :]], dim=-1)
    query, key = torch.split(rotated, [query.shape[1], key.shape[1]], dim=1)
    write_kv_reference(key, value, key_cache, value_cache, cache_index)
    return query.contiguous()
