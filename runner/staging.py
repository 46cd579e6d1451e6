"""The host's side of a step's one upload: page-locked buffers, and how schedule and admissions are packed into them.

Used by `runner.device_step`. The upload is one int32 buffer: the schedule's record (`kernels.prepare`), then a header
for each admission and behind them their ids and blocks (`kernels.admit`).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from runner.kernels.admit import HEADER
from runner.kernels.prepare import NEW_BLOCKS, SLOTS, STARTS
from runner.model import Model
from runner.row_copies import copy_rows
from runner.sampling_state import pack
from runner.step import Admission, Step
from runner.stream import Event


class Staging:
    """Host buffers of one step, page-locked on CUDA. Rewritten only after the step that used them is done."""

    def __init__(self, model: Model, num_slots: int, words: int, rows: int) -> None:
        """`words`: int32 of the largest upload. `rows`: embedding rows of the largest step."""
        pin = model.device.type == "cuda"
        self.words = torch.empty(words, dtype=torch.int32, pin_memory=pin)
        self.rows = torch.empty(rows, model.hidden_size, dtype=model.dtype, pin_memory=pin)
        self.tokens = torch.empty(num_slots, dtype=torch.int64, pin_memory=pin)
        """[S]: where the sampled ids come back to."""
        self.sampled: NDArray[np.int64] = self.tokens.numpy()
        """The same memory."""
        self.masks = torch.empty(0, dtype=torch.int32)
        """[G * W + G]: token masks, then the entries that they are for. Allocated when first asked for."""
        self.done: Event | None = None
        self._words: NDArray[np.int32] = self.words.numpy()
        self.record = self.words[: record_words(num_slots)].view(3, -1)
        """[3, S + 1]: the upload of a step that admits nobody."""
        self._record: NDArray[np.int32] = self.record.numpy()
        self._members, self._size = 0, (-1, -1)
        """`Step.members` of what the record holds, its entries and rows."""
        self._row_bytes: NDArray[np.uint8] = self.rows.view(torch.uint8).numpy()

    def reserve_masks(self, entries: list[int], words: int) -> NDArray[np.int32]:
        """Room for the token masks of `entries`: [len(entries), words]."""
        count, num_slots = len(entries), len(self.tokens)
        if len(self.masks) < count * (words + 1):
            self.masks = torch.empty(num_slots * (words + 1), dtype=torch.int32, pin_memory=self.tokens.is_pinned())
        host: NDArray[np.int32] = self.masks.numpy()
        host[count * words : count * (words + 1)] = entries
        return host[: count * words].reshape(count, words)

    def fill(self, step: Step) -> int:
        """Writes a step down; returns how many words of it there are."""
        self._fill_record(step)
        for row, rows in step.embedding_runs:
            copy_rows(self._row_bytes[row : row + len(rows)], rows)
        end = self._record.size + len(step.admissions) * HEADER
        for i, admission in enumerate(step.admissions):
            end = self._fill_admission(admission, self._record.size + i * HEADER, end)
        return end

    def _fill_record(self, step: Step) -> None:
        """Leaves alone what stands there from an earlier step."""
        record, n, size = self._record, step.num_entries, (step.num_entries, step.num_rows)
        record[NEW_BLOCKS, :n] = step.new_blocks
        if step.members and step.members == self._members:
            return
        record[SLOTS, :n], record[STARTS, : n + 1] = step.slots, step.starts
        if size != self._size:
            record[SLOTS, n:], record[STARTS, n + 1 :], record[NEW_BLOCKS, n:] = 0, step.num_rows, 0
        self._members, self._size = step.members, size

    def _fill_admission(self, admission: Admission, header: int, at: int) -> int:
        sequence, words = admission.sequence, self._words
        known, blocks = len(sequence.token_ids), len(admission.blocks)
        # Staged with the slot of the launch: a later preemption takes the sequence's slot away.
        words[header : header + 4] = sequence.slot, known, admission.computed, sequence.request.prompt_len
        words[header + 4 : header + 14] = pack(sequence.request.sampling, sequence.choice)
        words[header + 14 : header + 16] = at, blocks
        words[at : at + known] = sequence.token_ids
        if sequence.request.slot_ids is not None:
            words[at : at + sequence.request.prompt_len] = sequence.request.slot_ids
        for span in sequence.request.two_way:
            words[at + span.start : at + span.end] = -1 - span.end
        words[at + known : at + known + blocks] = admission.blocks
        return at + known + blocks


def record_words(num_slots: int) -> int:
    return 3 * (num_slots + 1)


def upload_words(num_slots: int, admitted_rows: int, block_size: int) -> int:
    """int32 words of the largest upload. `admitted_rows`: known rows of the sequences that one step may admit."""
    # Each admission's last block may be a partial one.
    return record_words(num_slots) + num_slots * (HEADER + 1) + admitted_rows + admitted_rows // block_size
