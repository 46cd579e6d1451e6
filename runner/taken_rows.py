"""A step's hidden states on their way to the host. Called by `runner.device_step` behind the forward, read by the
engine once the step is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner.step import HiddenRun


@dataclass(frozen=True)
class TakenRows:
    """A step's wanted hidden states on the host, readable once the step is done."""

    rows: Tensor
    """[N, hidden], model dtype: of the runs that are not summed, one behind the other."""
    sums: Tensor
    """[M, hidden], float32: of those that are."""

    def by_run(self, runs: list[HiddenRun]) -> Iterator[tuple[HiddenRun, NDArray[np.uint8]]]:
        """Each run with the bytes of its rows, or of its sum: [n, bytes of a row]."""
        rows, sums = self.rows.view(torch.uint8).numpy(), self.sums.view(torch.uint8).numpy()
        row = summed = 0
        for run in runs:
            if run.summed:
                yield run, sums[summed : summed + 1]
                summed += 1
            else:
                yield run, rows[row : row + run.end - run.start]
                row += run.end - run.start


def take_rows(hidden: Tensor, runs: list[HiddenRun], to_device: Callable[[Tensor], Tensor],
              to_host: Callable[[Tensor], Tensor]) -> TakenRows:  # fmt: skip
    """Queues the gathering of `runs` and one copy of each kind to the host.

    Args:
        hidden: [T, hidden], the step's, on the device; may be overwritten by what is queued behind this.
        to_device, to_host: copies that wait for nothing.
    """
    whole = [np.arange(run.first_row, run.first_row + run.end - run.start) for run in runs if not run.summed]
    sums = [
        hidden[run.first_row : run.first_row + run.end - run.start].sum(0, dtype=torch.float32)
        for run in runs
        if run.summed
    ]
    none = torch.empty(0, hidden.shape[1], dtype=hidden.dtype)
    rows = to_host(hidden[to_device(torch.from_numpy(np.concatenate(whole)))]) if whole else none
    return TakenRows(rows, to_host(torch.stack(sums)) if sums else none.float())
