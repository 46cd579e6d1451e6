"""Latent steps on the device: a row's last hidden state is the next row (`SamplingParams.latent_steps`).

Called by `runner.device_step` around the forward and behind sampling, outside of what is captured: in a graph a latent
step is a decode like any other, whose row happens to be an embedding, and whose sampled token nobody takes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from runner.messages import EMBEDDING_ID
from runner.model import Model
from runner.slots import SlotState
from runner.step import Step

ToDevice = Callable[[Tensor], Tensor]
"""A copy of a small host tensor, that waits for nothing."""


class LatentRows:
    def __init__(self, model: Model, num_slots: int) -> None:
        self._rows = torch.zeros(num_slots, model.hidden_size, dtype=model.dtype, device=model.device)
        """[S, hidden]: each slot's latest hidden state, if a latent step follows."""
        self._marker = torch.full((1,), EMBEDDING_ID, dtype=torch.int32, device=model.device)

    def place(self, step: Step, rows: Tensor, to_device: ToDevice) -> None:
        """Before the forward: the rows of `step.latent_inputs`, into the step's embedding rows [T, hidden]."""
        entries = step.latent_inputs
        index = to_device(torch.from_numpy(np.stack([step.starts[entries], step.slots[entries]]).astype(np.int64)))
        rows[index[0]] = self._rows[index[1]]

    def keep(self, step: Step, hidden: Tensor, to_device: ToDevice) -> Tensor:
        """Behind the forward: keeps the last hidden state of each of `step.latent_outputs`; returns them, [n, hidden].

        Args:
            hidden: [T, hidden], the step's.
        """
        entries = step.latent_outputs
        places = np.stack([step.starts[entries + 1] - 1, step.slots[entries]]).astype(np.int64)
        index = to_device(torch.from_numpy(places))
        taken = hidden[index[0]]
        self._rows[index[1]] = taken
        return taken

    def mark(self, step: Step, slots: SlotState, to_device: ToDevice) -> None:
        """Behind sampling: what was sampled for `step.latent_outputs` becomes an embedding row."""
        entries = step.latent_outputs
        places = np.stack([step.slots[entries], step.positions[entries]]).astype(np.int64)
        index = to_device(torch.from_numpy(places))
        slots.token_ids.index_put_((index[0], index[1]), self._marker)
