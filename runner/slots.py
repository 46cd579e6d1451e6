"""Per-request state on the device, indexed by slot, and the buffers of one step that are derived from it.

Written by `runner.device_step` and the kernels that it calls; a slot never moves while its sequence runs. Every
position's kind (token or embedding) is *derived* here from `token_ids`, on the device, in every step: there is no mask
that the host could forget to upload.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runner.messages import EMBEDDING_ID


@dataclass
class SlotState:
    """What the device knows of each running sequence. S slots; all int32, on the device."""

    token_ids: Tensor
    """[S, max_model_len]: prompt and sampled ids; negative at embedding rows: `EMBEDDING_ID`, or -1 - e at those of a
    two-way span that ends before row e, or what `runner.hints` makes of a hint. Valid below `length`."""
    block_table: Tensor
    """[S, blocks_per_seq]: KV blocks in row order. Valid below ceil(computed / block_size) and where a step writes."""
    length: Tensor
    """[S]: rows known so far, prompt and sampled tokens together."""
    computed: Tensor
    """[S]: rows whose keys and values are in the cache."""
    prompt_len: Tensor
    """[S]"""

    @staticmethod
    def allocate(num_slots: int, max_model_len: int, block_size: int, device: torch.device) -> SlotState:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return SlotState(
            token_ids=zeros(num_slots, max_model_len),
            block_table=zeros(num_slots, -(-max_model_len // block_size)),
            length=zeros(num_slots),
            computed=zeros(num_slots),
            prompt_len=zeros(num_slots),
        )

    def fill_with_garbage(self, vocab_size: int, num_blocks: int) -> None:
        """Plausible, wrong values, so that reading a slot before it is written shows in the output (debug checks)."""
        # Both kinds of row and ids inside the vocabulary: the worst garbage is the kind that looks right.
        self.token_ids.random_(EMBEDDING_ID, vocab_size)
        self.block_table.random_(0, num_blocks)
        for field in (self.length, self.computed, self.prompt_len):
            field.random_(0, self.token_ids.shape[1])


@dataclass
class StepInputs:
    """Buffers of one step, derived from the schedule and the slots by `kernels.prepare`. T rows, S entries.

    An *entry* is one sequence's share of the step; entries are packed, decodes first. Past the step's own rows and
    entries the buffers hold padding: token 0 at position 0, written to the dummy block 0.
    """

    token_ids: Tensor
    """[T] int32, clamped: 0 at embedding rows."""
    is_token_ids: Tensor
    """[T] bool"""
    positions: Tensor
    """[T] int64"""
    cache_index: Tensor
    """[T] int64: row of the KV cache, block * block_size + offset."""
    seq_lens: Tensor
    """[S] int32: rows that entry i attends to at most, this step's included."""
    last_rows: Tensor
    """[S] int64: row index of entry i's last row in the step."""
    samples: Tensor
    """[S] bool: whether entry i reaches its last known row, so that its next token is sampled."""
    attend_until: Tensor | None = None
    """[T] int32: each row attends to the rows of its sequence before this one. Only for models that have rows that
    attend both ways; for all others it is the row behind their own."""

    @staticmethod
    def allocate(max_rows: int, num_slots: int, device: torch.device, *, two_way: bool = False) -> StepInputs:
        def zeros(size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return StepInputs(
            token_ids=zeros(max_rows, torch.int32),
            is_token_ids=zeros(max_rows, torch.bool),
            positions=zeros(max_rows, torch.int64),
            cache_index=zeros(max_rows, torch.int64),
            seq_lens=zeros(num_slots, torch.int32),
            last_rows=zeros(num_slots, torch.int64),
            samples=zeros(num_slots, torch.bool),
            attend_until=zeros(max_rows, torch.int32) if two_way else None,
        )
