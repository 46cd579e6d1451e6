"""FlashAttention 3 for the prompts of a step (Shah et al. 2024, arXiv:2407.08608), where its wheel is installed.

Chosen by `runner.trial` on a Hopper GPU: the extra `fa3` brings the wheel, nothing needs it. Decodes stay with
`triton_attention`, whose KV splits a long sequence's program into many; so does what this build of FlashAttention
leaves out: scores that are capped, and rows that attend both ways.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from runner.attention.backend import AttentionBatch
from runner.attention.triton_attention import TritonAttention

_HOPPER = (9, 0)
_MAX_HEAD_DIM = 256


class Operators(Protocol):
    """FlashAttention 3's, as it registers them with torch."""

    fwd: Callable[..., Any]
    get_scheduler_metadata: Callable[..., Tensor]


def load_operators() -> Operators | None:
    """None where the wheel isn't installed or doesn't load."""
    try:
        importlib.import_module("flash_attn_3._C")
    except (ImportError, OSError):
        return None
    return cast(Operators, torch.ops.flash_attn_3)


def fits(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether it computes on this device with these numbers."""
    return torch.cuda.get_device_capability(device) == _HOPPER and dtype in (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Prompts:
    """A step as the operators take it: its entries, those of decodes emptied, and its padding as one entry more. Worked
    out once a step, the same for every layer."""

    starts: Tensor
    """[entries + 2] int32: the first row of each, and the number of rows."""
    counts: Tensor
    """[entries + 1] int32: rows of each that are computed."""
    seq_lens: Tensor
    """[entries + 1] int32: its keys. Padding has none, and gets zeros."""
    block_table: Tensor
    """[entries + 1, blocks_per_seq] int32"""
    schedules: dict[tuple[int, int, int, int], Tensor] = field(default_factory=dict)
    """How the operator shares the work out, by the kind of layer."""

    @classmethod
    def of(cls, batch: AttentionBatch, num_rows: int) -> _Prompts:
        """Nothing in it depends on what only the host knows, so that a captured step works it out anew."""
        entries, zero = batch.num_entries, torch.zeros_like(batch.seq_lens[:1])
        starts = torch.cat([batch.entry_starts[: entries + 1], zero + num_rows])
        counts = starts.diff()
        is_decode = counts == 1
        is_decode[batch.num_decodes :] = False
        seq_lens = torch.cat([batch.seq_lens[:entries], zero]).masked_fill_(is_decode, 0)
        table = batch.block_table[batch.entry_slots[: entries + 1].long()]
        return cls(starts, counts.masked_fill_(is_decode, 0), seq_lens, table)


class FlashAttention3(TritonAttention):
    """`AttentionBackend` for Hopper.

    Args:
        operators: as `load_operators` gives them.
    """

    def __init__(self, operators: Operators) -> None:
        super().__init__()
        self._operators = operators

    def _attend_prompts(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch, out: Tensor,
                        scale: float, window: int | None, softcap: float | None) -> None:  # fmt: skip
        if softcap is not None or batch.attend_until is not None or query.shape[2] > _MAX_HEAD_DIM:
            super()._attend_prompts(query, key_cache, value_cache, batch, out, scale, window, softcap)
            return
        if batch.plan is None:
            batch.plan = _Prompts.of(batch, len(query))
        plan: _Prompts = batch.plan
        left = -1 if window is None else window - 1
        self._operators.fwd(
            query,
            key_cache,
            value_cache,
            out=out,
            cu_seqlens_q=plan.starts,
            seqused_q=plan.counts,
            seqused_k=plan.seq_lens,
            max_seqlen_q=len(query),
            page_table=plan.block_table,
            softmax_scale=scale,
            is_causal=True,
            window_size_left=left,
            scheduler_metadata=self._schedule(plan, query, key_cache, left),
            num_splits=1,
        )

    def _schedule(self, plan: _Prompts, query: Tensor, key_cache: Tensor, left: int) -> Tensor:
        """Without it every layer would launch a kernel that works it out."""
        (rows, heads, head_dim), (block_size, kv_heads) = query.shape, key_cache.shape[1:3]
        kind = heads, kv_heads, head_dim, left
        if kind not in plan.schedules:
            plan.schedules[kind] = self._operators.get_scheduler_metadata(
                batch_size=len(plan.counts),
                max_seqlen_q=rows,
                max_seqlen_k=plan.block_table.shape[1] * block_size,
                num_heads=heads,
                num_heads_k=kv_heads,
                headdim=head_dim,
                headdim_v=head_dim,
                qkv_dtype=query.dtype,
                seqused_k=plan.seq_lens,
                cu_seqlens_q=plan.starts,
                seqused_q=plan.counts,
                page_size=block_size,
                is_causal=True,
                window_size_left=left,
                num_splits=1,
            )
        return plan.schedules[kind]
