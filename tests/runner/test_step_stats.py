"""What is measured of steps: time without counting overlap twice, rows, sequences, graphs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from runner.messages import (
    STEP_ROWS_BOUNDS,
    STEP_SECONDS_BOUNDS,
    Heartbeat,
    HistogramCounts,
    Stats,
    decode_from_runner,
    encode,
)
from runner.step import Step
from runner.step_stats import BucketCounts, StepStats


def step(*rows: int) -> Step:
    starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
    slots = np.arange(len(rows), dtype=np.int32)
    nothing = np.zeros(len(rows), np.bool_)
    return Step(slots, starts, starts[1:], slots, nothing, nothing, slots, 0, sum(rows), [], [])


def clock(*times: float) -> Iterator[float]:
    return iter(times)


def test_a_value_counts_at_the_first_bound_that_it_does_not_exceed() -> None:
    counts = BucketCounts((1.0, 2.0, 4.0))
    for value in (0.5, 1.0, 1.5, 4.0, 4.5, 100.0):
        counts.observe(value)
    assert counts.snapshot() == HistogramCounts((2, 1, 1, 2), 111.5)


def test_overlapped_steps_share_no_time() -> None:
    times = clock(0.0, 1.0, 2.0, 3.0)  # launch, launch, retire, retire
    stats = StepStats(lambda: next(times))
    stats.launched()
    stats.launched()
    stats.retired(step(1), captured=True)
    stats.retired(step(1), captured=True)
    # From 0 to 2, and from there to 3: not from 1.
    assert stats.seconds.snapshot().sum == 3.0


def test_idle_time_is_no_step_s() -> None:
    times = clock(0.0, 1.0, 50.0, 51.0)
    stats = StepStats(lambda: next(times))
    for _ in range(2):
        stats.launched()
        stats.retired(step(1), captured=False)
    assert stats.seconds.snapshot().sum == 2.0


def test_rows_sequences_and_graphs() -> None:
    stats = StepStats()
    for each, captured in ((step(1, 1, 1), True), (step(1, 30), False)):
        stats.launched()
        stats.retired(each, captured=captured)
    assert (stats.steps, stats.captured) == (2, 1)
    assert stats.rows.snapshot().sum == 34
    assert stats.sequences.snapshot().sum == 5
    rows = stats.rows.snapshot().counts
    assert (rows[STEP_ROWS_BOUNDS.index(4.0)], rows[STEP_ROWS_BOUNDS.index(32.0)], sum(rows)) == (1, 1, 2)


def test_a_heartbeat_carries_them() -> None:
    histogram = HistogramCounts(tuple(range(len(STEP_SECONDS_BOUNDS) + 1)), 2.5)
    stats = Stats(steps=3, step_seconds=histogram, waiting_rows=7)
    assert decode_from_runner(encode(Heartbeat(stats))) == Heartbeat(stats)
