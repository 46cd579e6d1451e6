"""Position ids in three dimensions (M-RoPE), for the models that have them: an image's rows have a time, a height and a
width, and what follows an image goes on behind the largest of these.

Part of `runner.device_step`, only where the model asks for it. A prompt's ids come with the request and are uploaded
chunk by chunk, as embedding rows are; behind the prompt they are the row's place and an offset, kept by slot on the
device, so that a decode needs no upload but this one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from runner.kernels.prepare import SLOTS, STARTS
from runner.step import Step


class PositionIds:
    def __init__(self, max_rows: int, num_slots: int, staging_depth: int, device: torch.device) -> None:
        """`staging_depth`: steps whose host buffers exist at once."""
        pin = device.type == "cuda"
        self._given = torch.full((3, max_rows), -1, dtype=torch.int32, device=device)
        """Of the step's rows; -1 where they follow from the row's place."""
        self._offsets = torch.zeros(num_slots, dtype=torch.int32, device=device)
        """By slot: what a row behind the prompt adds to its place."""
        self._host_given = torch.empty(staging_depth, 3, max_rows, dtype=torch.int32, pin_memory=pin)
        self._host_offsets = torch.zeros(staging_depth, num_slots, dtype=torch.int32, pin_memory=pin)
        self._current = torch.zeros(num_slots, dtype=torch.int32)
        self._is_given = False
        """Whether the step before has left ids in `_given`."""
        self._rows = torch.arange(max_rows, dtype=torch.int32, device=device)

    def stage(self, step: Step, index: int) -> Callable[[], None]:
        """Writes a step's ids down in host buffer `index`, which nobody reads any more; returns what uploads them."""
        for admission in step.admissions:
            request = admission.sequence.request
            self._current[admission.sequence.slot] = request.position_offset
        offsets, given = self._host_offsets[index], self._host_given[index, :, : step.num_rows]
        offsets.copy_(self._current)
        is_given, was_given = bool(step.position_runs), self._is_given
        self._is_given = is_given
        if is_given:
            given.fill_(-1)
            for row, positions in step.position_runs:
                given[:, row : row + positions.shape[1]] = torch.from_numpy(positions.copy())

        def upload() -> None:
            self._offsets.copy_(offsets, non_blocking=True)
            if is_given:
                for there, here in zip(self._given[:, : step.num_rows], given, strict=True):
                    there.copy_(here, non_blocking=True)
            elif was_given:
                self._given.fill_(-1)

        return upload

    def derive(self, positions: Tensor, record: Tensor) -> Tensor:
        """The ids of a step's rows, [3, T] int64. Nothing in it depends on data that only the host has.

        Args:
            positions: [T] int64, their places. record: see `kernels.prepare`.
        """
        rows = len(positions)
        entry = torch.searchsorted(record[STARTS], self._rows[:rows], right=True) - 1
        slot = record[SLOTS][entry.clamp(0, record.shape[1] - 1)].long()
        given = self._given[:, :rows]
        return torch.where(given >= 0, given.long(), positions + self._offsets[slot])
