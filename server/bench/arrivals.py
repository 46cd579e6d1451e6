"""When an open loop sends its requests: constant, Poisson or gamma-distributed gaps, at a steady or a rising rate.

All are made of one process of rate 1, whose gaps have mean 1: constant ones, or gamma-distributed ones of a shape
called burstiness, as in vLLM's benchmark (1 is Poisson, less is burstier, more is more even). Its moments are then
moved to where the wanted rate has let as many requests arrive.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Arrivals:
    """`rate`: requests a second at the beginning, `end_rate`: at the end (None: the same), in between linear.
    `burstiness` None: constant gaps."""

    rate: float
    end_rate: float | None = None
    burstiness: float | None = 1.0
    seed: int = 0

    def count_in(self, seconds: float) -> int:
        """How many requests are due in so long a time; at least one."""
        return max(1, round(seconds * (self.rate + self._end_rate) / 2))

    def times(self, count: int) -> tuple[float, ...]:
        """Seconds from the start, ascending; the first is 0."""
        return tuple(float(value) for value in self._moved(self._unit(count), count))

    @property
    def _end_rate(self) -> float:
        return self.rate if self.end_rate is None else self.end_rate

    def _unit(self, count: int) -> Array:
        if self.burstiness is None:
            return np.arange(count, dtype=np.float64)
        draw = np.random.default_rng((self.seed, 7))
        gaps = draw.gamma(self.burstiness, 1 / self.burstiness, count - 1)
        return np.concatenate(([0.0], np.cumsum(gaps)))

    def _moved(self, unit: Array, count: int) -> Array:
        """Where the integral of the rate, r0·t + (r1 − r0)·t²/2T, reaches each moment; T: when `count` have come."""
        r0, r1 = self.rate, self._end_rate
        if math.isclose(r0, r1):
            return unit / r0
        slope = (r1 - r0) * (r0 + r1) / (2 * count)
        # Random gaps may lead past T: there the rate stays what it is at T.
        end = 2 * count / (r0 + r1)
        inside = np.minimum(unit, count)
        times: Array = 2 * inside / (r0 + np.sqrt(np.maximum(r0**2 + 2 * slope * inside, 0)))
        return np.where(unit <= count, times, end + (unit - count) / r1)
