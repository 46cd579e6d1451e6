"""Schedules: exact where they are, and their moments where they are random."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.bench.arrivals import Arrivals


def test_constant() -> None:
    assert Arrivals(4.0, burstiness=None).times(5) == (0.0, 0.25, 0.5, 0.75, 1.0)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rates_mean_and_the_burstiness_variance(burstiness: float) -> None:
    """A gamma distribution of shape k and mean m has the variance m²/k; k = 1 is the exponential one."""
    gaps = np.diff(Arrivals(20.0, burstiness=burstiness, seed=1).times(40_000))
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.03)
    assert gaps.var() == pytest.approx(1 / 20**2 / burstiness, rel=0.06)


def test_a_seed_is_a_schedule() -> None:
    assert Arrivals(5.0, seed=3).times(50) == Arrivals(5.0, seed=3).times(50)
    assert Arrivals(5.0, seed=3).times(50) != Arrivals(5.0, seed=4).times(50)


@given(st.floats(0.1, 100), st.floats(0.1, 100), st.integers(2, 500))
def test_a_ramp_of_constant_gaps_follows_the_integral_of_its_rate(start: float, end: float, count: int) -> None:
    times = np.array(Arrivals(start, end, burstiness=None).times(count))
    length = 2 * count / (start + end)
    due = start * times + (end - start) * times**2 / (2 * length)
    assert due == pytest.approx(np.arange(count), abs=1e-5 * count)


@given(st.floats(0.1, 100), st.floats(0.1, 100), st.floats(0.1, 10), st.integers(1, 300))
def test_times_ascend_from_zero(start: float, end: float, burstiness: float, count: int) -> None:
    """Also where random gaps lead beyond the ramp's end."""
    times = Arrivals(start, end, burstiness).times(count)
    assert len(times) == count and times[0] == 0.0
    assert np.isfinite(times).all() and (np.diff(times) >= 0).all()


def test_how_many_are_due() -> None:
    assert Arrivals(10.0).count_in(6.0) == 60
    assert Arrivals(10.0, 30.0).count_in(6.0) == 120
    assert Arrivals(0.01).count_in(1.0) == 1
