"""Paged attention as the CPU runs it: decodes by a kernel of its own, chunks of prompts by torch's SDPA."""

from __future__ import annotations

import torch
from torch import Tensor

from runner.attention.backend import AttentionBatch
from runner.attention.sdpa import attend_chunk, chunk_groups
from runner.kernels.decode_attention_cpu import attend_decodes_cpu


class CpuAttention:
    capturable = False
    short_seq_len = 0

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch, *, scale: float,
               window: int | None, softcap: float | None) -> Tensor:  # fmt: skip
        query = query.contiguous()
        out = torch.empty(query.shape, dtype=query.dtype)
        if batch.num_decodes:
            attend_decodes_cpu(query, key_cache, value_cache, batch, out, scale=scale, window=window, softcap=softcap)
        if batch.num_decodes < batch.num_entries:
            if batch.plan is None:
                batch.plan = chunk_groups(batch)
            for group in batch.plan:
                out[group.rows] = attend_chunk(group, query, key_cache, value_cache, scale, window, softcap)
        return out
