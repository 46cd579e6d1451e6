"""Paged attention as the CPU runs it: a kernel of its own, and torch's SDPA for what attends both ways
and for odd head sizes in bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor

from runner.attention.backend import AttentionBatch
from runner.attention.sdpa import SdpaAttention, attend_chunk, chunk_groups
from runner.kernels.attention_cpu import attend_cpu, takes_head_size


class CpuAttention:
    capturable = False
    short_seq_len = 0

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch, *, scale: float,
               window: int | None, softcap: float | None) -> Tensor:  # fmt: skip
        if not takes_head_size(query.dtype, query.shape[2]):
            return SdpaAttention().attend(
                query, key_cache, value_cache, batch, scale=scale, window=window, softcap=softcap
            )  # fmt: skip
        query = query.contiguous()
        out = torch.empty(query.shape, dtype=query.dtype)
        two_way = batch.attend_until is not None
        entries = batch.num_decodes if two_way else batch.num_entries
        if entries:
            attend_cpu(
                query, key_cache, value_cache, batch, out, num_entries=entries, scale=scale, window=window,
                softcap=softcap,
            )  # fmt: skip
        if two_way and entries < batch.num_entries:
            if batch.plan is None:
                batch.plan = chunk_groups(batch)
            for group in batch.plan:
                out[group.rows] = attend_chunk(group, query, key_cache, value_cache, scale, window, softcap)
        return out
