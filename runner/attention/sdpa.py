"""Paged attention in plain torch: the reference that kernels are held against, and what the CPU
computes prompts with (`attention.cpu_attention`)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from runner.attention.backend import AttentionBatch


@dataclass
class Group:
    """Sequences that go through one call: all decodes of a step, or one chunk of a prompt."""

    rows: slice
    """Of the step."""
    position: Tensor
    """[rows, 1] int64"""
    blocks: Tensor
    """[sequences, blocks] int64: of each sequence, as many as the longest has."""
    length: int
    """Cached rows of the longest."""
    until: Tensor
    """[rows, 1]: the first position that a row doesn't see."""
    masks: dict[int | None, Tensor] = field(default_factory=dict)
    """[rows, length] bool, by window: causal, within the window."""

    def mask(self, window: int | None) -> Tensor:
        if window not in self.masks:
            seen = torch.arange(self.length, device=self.position.device)
            mask = seen < self.until
            self.masks[window] = mask if window is None else mask & (seen > self.position - window)
        return self.masks[window]

    def cached(self, cache: Tensor) -> Tensor:
        """[sequences, num_kv_heads, length, head_dim], gathered from the blocks. What lies past a sequence's end is
        some other block's; the mask hides it."""
        # Whole blocks are copied: an index over four dimensions would be looked up for each value.
        found = cache.flatten(1).index_select(0, self.blocks.flatten())
        return found.view(len(self.blocks), -1, *cache.shape[2:])[:, : self.length].transpose(1, 2)


class SdpaAttention:
    """Decodes go through one padded SDPA call, every prefill chunk through one of its own."""

    capturable = False  # shapes are cut to the sequences' lengths, by the host
    short_seq_len = 0

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch, *, scale: float,
               window: int | None, softcap: float | None) -> Tensor:  # fmt: skip
        if batch.plan is None:
            decodes = [] if batch.num_decodes == 0 else [_group(batch, slice(0, batch.num_decodes))]
            batch.plan = decodes + chunk_groups(batch)
        parts = []
        kv_heads, head_dim = key_cache.shape[2:]
        for i, group in enumerate(batch.plan):
            if i == 0 and batch.num_decodes:
                key, value, mask = group.cached(key_cache), group.cached(value_cache), group.mask(window)
                rows = query[group.rows]
                # The query heads that share a KV head become the rows of one attention: no key is repeated in memory.
                grouped = rows.view(len(rows), kv_heads, -1, head_dim)
                parts.append(_attention(grouped, key, value, mask[:, None, None], scale, softcap).flatten(1, 2))
            else:
                parts.append(attend_chunk(group, query, key_cache, value_cache, scale, window, softcap))
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)


def attend_chunk(group: Group, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float,
                 window: int | None, softcap: float | None) -> Tensor:  # fmt: skip
    """[rows, num_heads, head_dim]: the group's rows of `query`, which are a chunk of one prompt, over its cache."""
    rows = query[group.rows].transpose(0, 1)[None]
    key, value = group.cached(key_cache), group.cached(value_cache)
    return _attention(rows, key, value, group.mask(window), scale, softcap)[0].transpose(0, 1)


def chunk_groups(batch: AttentionBatch) -> list[Group]:
    """One for each entry that isn't a decode. Worked out once a step: the same for every layer."""
    return [_group(batch, slice(entry, entry + 1)) for entry in range(batch.num_decodes, batch.num_entries)]


def _group(batch: AttentionBatch, entries: slice) -> Group:
    rows = slice(batch.host_starts[entries.start], batch.host_starts[entries.stop])
    length = max(batch.host_seq_lens[entries])
    blocks = batch.block_table[batch.entry_slots[entries].long(), : -(-length // batch.key_caches[0].shape[1])].long()
    positions = batch.positions[rows, None]
    until = positions + 1 if batch.attend_until is None else batch.attend_until[rows, None]
    return Group(rows, positions, blocks, length, until)


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
