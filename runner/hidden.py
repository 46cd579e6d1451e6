"""Last hidden states on their way out: which of them a request wants, and how they are sent.

The scheduler names the wanted rows of a step (`step.HiddenRun`), `runner.device_step` takes them behind the forward
(`runner.taken_rows`), the engine sends them once they are on the host. What may be asked for is said at
`SamplingParams.return_hidden_states`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from runner.messages import HiddenRows, SamplingParams

if TYPE_CHECKING:
    from runner.sequence import Request
    from runner.step import HiddenRun

NO_POSITION = 2**31 - 1
"""Behind every position of a sequence."""
PIECE_BYTES = 1 << 18
"""Of one message: a worker's event loop decodes it in one go."""


def first_hidden(sampling: SamplingParams, answer_start: int, choice: int) -> int:
    """The first position whose hidden state a choice is asked for; `NO_POSITION` where it is asked for none."""
    if not sampling.return_hidden_states:
        return NO_POSITION
    return 0 if sampling.return_hidden_states in ("all", "mean") and choice == 0 else answer_start - 1


class KeptHidden:
    """What of a sequence's hidden states waits for its end: the last one, or the sum so far."""

    def __init__(self) -> None:
        self._last: tuple[int, bytes] | None = None
        """(position, row)"""
        self._sum: NDArray[np.float64] | None = None

    def takes(self, sampling: SamplingParams, run: HiddenRun, rows: NDArray[np.uint8], count: int) -> bool:
        """Whether the first `count` rows of a run are kept here, and not sent as they come."""
        if sampling.return_hidden_states == "mean":
            total = rows.view(np.float32)[0].astype(np.float64)
            self._sum = total if self._sum is None else self._sum + total
            return True
        if sampling.return_hidden_states == "last":
            self._last = run.start + count - 1, rows[count - 1].tobytes()
            return True
        return False

    def messages(self, request: Request, choice: int) -> list[HiddenRows]:
        """What goes with the end; nothing where nothing was kept."""
        number = request.key[1]
        if self._sum is not None:
            mean = (self._sum / request.prompt_len).astype(np.float32)
            return [HiddenRows(number, choice, 0, mean.tobytes())]
        return [] if self._last is None else [HiddenRows(number, choice, *self._last)]


def pieces(request: int, choice: int, start: int, rows: NDArray[np.uint8]) -> Iterator[HiddenRows]:
    """Rows [n, bytes of a row] at positions start, start + 1, …, in messages of at most PIECE_BYTES, or of one row."""
    step = max(PIECE_BYTES // rows.shape[1], 1)
    for first in range(0, len(rows), step):
        yield HiddenRows(request, choice, start + first, rows[first : first + step].tobytes())
