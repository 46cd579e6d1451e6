"""Paged attention in plain torch: what the CPU runs, and the reference that the Triton kernels are held against."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from runner.attention.backend import AttentionBatch


class SdpaAttention:
    """Decodes go through one padded SDPA call, every prefill chunk through one of its own."""

    capturable = False  # shapes are cut to the sequences' lengths, by the host

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch, *, scale: float,
               window: int | None, softcap: float | None) -> Tensor:  # fmt: skip
        out = torch.zeros_like(query, memory_format=torch.contiguous_format)
        if batch.num_decodes:
            out[: batch.num_decodes] = self._decode(query, key_cache, value_cache, batch, scale, window, softcap)
        for entry in range(batch.num_decodes, batch.num_entries):
            start, end = batch.host_starts[entry], batch.host_starts[entry + 1]
            length = batch.host_seq_lens[entry]
            key = _rows(key_cache, batch, slice(entry, entry + 1), length)
            value = _rows(value_cache, batch, slice(entry, entry + 1), length)
            seen = torch.arange(length, device=query.device)
            mask = _visible(batch.positions[start:end, None], seen, window)
            rows = query[start:end].transpose(0, 1)[None]
            out[start:end] = _attention(rows, key, value, mask, scale, softcap)[0].transpose(0, 1)
        return out

    @staticmethod
    def _decode(query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch, scale: float,
                window: int | None, softcap: float | None) -> Tensor:  # fmt: skip
        n = batch.num_decodes
        length = max(batch.host_seq_lens[:n])
        key = _rows(key_cache, batch, slice(0, n), length)
        value = _rows(value_cache, batch, slice(0, n), length)
        kv_heads = key.shape[1]
        # The query heads that share a KV head become the rows of one attention: no key is repeated in memory.
        grouped = query[:n].view(n, kv_heads, -1, query.shape[2])
        mask = _visible(batch.positions[:n, None], torch.arange(length, device=query.device), window)
        return _attention(grouped, key, value, mask[:, None, None], scale, softcap).flatten(1, 2)


def _rows(cache: Tensor, batch: AttentionBatch, entries: slice, length: int) -> Tensor:
    """[entries, num_kv_heads, length, head_dim]: the sequences' rows, gathered from their blocks. What lies past a
    sequence's end is some other block's; the mask hides it."""
    blocks = -(-length // cache.shape[1])
    table = batch.block_table[batch.entry_slots[entries].long(), :blocks].long()
    return cache[table].flatten(1, 2)[:, :length].transpose(1, 2)


def _visible(position: Tensor, seen: Tensor, window: int | None) -> Tensor:
    """[rows, length] bool: causal, within the window."""
    mask = seen <= position
    return mask if window is None else mask & (seen > position - window)


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float | None) -> Tensor:
    """SDPA, or the same written out where scores are capped (SDPA has no hook between scores and softmax).

    The query's heads are a multiple of the key's. The values of rows that nobody sees may be anything finite.
    """
    if softcap is None:
        grouped = query.shape[1] != key.shape[1]
        return scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=grouped)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = softcap * torch.tanh(query @ key.transpose(-1, -2) * scale / softcap)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1, dtype=torch.float32)
    return weights.to(value.dtype) @ value
