"""What reaches the device of a step's embedding rows. (Whole steps: tests/parity.)"""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from runner.device_step import _GAP, _ranges


@given(st.lists(st.tuples(st.integers(0, 3 * _GAP), st.integers(1, 5)), max_size=30))
def test_every_embedding_row_is_copied_once(gaps: list[tuple[int, int]]) -> None:
    """`gaps`: (token rows in front of a run, its length)."""
    runs, row = [], 0
    for gap, length in gaps:
        runs.append((row + gap, np.zeros((length, 2), np.uint8)))
        row += gap + length
    ranges = _ranges(runs)
    copied = [place for start, end in ranges for place in range(start, end)]
    assert len(set(copied)) == len(copied)
    assert {place for start, run in runs for place in range(start, start + len(run))} <= set(copied)
    assert len(copied) <= sum(len(run) for _, run in runs) + _GAP * len(runs)
    assert all(start - end > _GAP for (_, end), (start, _) in itertools.pairwise(ranges))
