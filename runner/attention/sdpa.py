"""Paged attention in plain torch: what the CPU runs, and the reference that the Triton kernels are held against."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from runner.attention.backend import AttentionBatch


@dataclass
class _Group:
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
        return cache[self.blocks].flatten(1, 2)[:, : self.length].transpose(1, 2)


class SdpaAttention:
    """Decodes go through one padded SDPA call, every prefill chunk through one of its own."""

    capturable = False  # shapes are cut to the sequences' lengths, by the host
    short_seq_len = 0

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch, *, scale: float,
               window: int | None, softcap: float | None) -> Tensor:  # fmt: skip
        if batch.plan is None:
            batch.plan = _groups(batch)
        parts = []
        kv_heads, head_dim = key_cache.shape[2:]
        for i, group in enumerate(batch.plan):
            key, value, mask = group.cached(key_cache), group.cached(value_cache), group.mask(window)
            rows = query[group.rows]
            if i == 0 and batch.num_decodes:
                # The query heads that share a KV head become the rows of one attention: no key is repeated in memory.
                grouped = rows.view(len(rows), kv_heads, -1, head_dim)
                parts.append(_attention(grouped, key, value, mask[:, None, None], scale, softcap).flatten(1, 2))
            else:
                out = _attention(rows.transpose(0, 1)[None], key, value, mask, scale, softcap)
                parts.append(out[0].transpose(0, 1))
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)


def _groups(batch: AttentionBatch) -> list[_Group]:
    """Worked out once a step: the same for every layer."""
    block_size, decodes = batch.key_caches[0].shape[1], batch.num_decodes

    def group(entries: slice) -> _Group:
        rows = slice(batch.host_starts[entries.start], batch.host_starts[entries.stop])
        length = max(batch.host_seq_lens[entries])
        blocks = batch.block_table[batch.entry_slots[entries].long(), : -(-length // block_size)].long()
        positions = batch.positions[rows, None]
        until = positions + 1 if batch.attend_until is None else batch.attend_until[rows, None]
        return _Group(rows, positions, blocks, length, until)

    chunks = [group(slice(entry, entry + 1)) for entry in range(decodes, batch.num_entries)]
    return [group(slice(0, decodes)), *chunks] if decodes else chunks


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
