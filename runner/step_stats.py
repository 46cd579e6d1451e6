"""What the engine measures of its steps: histograms of their time, rows and sequences, and how many were graphs.

Told by the engine at each launch and each retirement, read once a heartbeat. The cost of a step is three bisections and
a few additions of Python numbers; nothing is measured per token.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence

from runner.messages import STEP_ROWS_BOUNDS, STEP_SECONDS_BOUNDS, STEP_SEQUENCES_BOUNDS, HistogramCounts
from runner.step import Step


class BucketCounts:
    """A histogram: how many values were at most each bound (and above the last), and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def snapshot(self) -> HistogramCounts:
        return HistogramCounts(tuple(self._counts), self._sum)


class StepStats:
    """All of it counts from the engine's start. `clock`: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._launched: deque[float] = deque()
        self._retired = 0.0
        self.seconds = BucketCounts(STEP_SECONDS_BOUNDS)
        """From a step's launch, or from the retirement of the one before it if that came later, to its own retirement:
        the sum is the time in which the device had work, and overlapped steps don't count twice."""
        self.rows = BucketCounts(STEP_ROWS_BOUNDS)
        self.sequences = BucketCounts(STEP_SEQUENCES_BOUNDS)
        self.captured = 0
        """Steps whose forward was a captured graph; the others ran eagerly."""
        self.steps = 0

    def launched(self) -> None:
        self._launched.append(self._clock())

    def retired(self, step: Step, *, captured: bool) -> None:
        """Steps retire in the order in which they were launched."""
        now = self._clock()
        self.seconds.observe(now - max(self._launched.popleft(), self._retired))
        self._retired = now
        self.rows.observe(step.num_rows)
        self.sequences.observe(step.num_entries)
        self.steps += 1
        self.captured += captured
