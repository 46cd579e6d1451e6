"""How many prompt rows a step may have, beside others' decodes most of all. Asked by the scheduler before every step.

A step reads the model's weights once, for decodes and prompts alike, so that prompt rows are cheapest where a few of
them go along with decodes in every step; many at once make those who decode wait and the device pay for each of them.
So prompts are taken about as fast as they come, and not faster: the bound follows what was taken of late.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

_STEPS = 32
"""How many steps count as of late."""
_AHEAD = 4 / 3
"""The bound, in terms of what was taken of late: what waits is caught up with, at a growing pace. In a simulation of
closed and open loops with an 8B model's step times, 2 made waves of prompts last, 1 left bursts waiting, and this
took one per cent more than 3/2."""
_SHARES = 8
"""Steps that one long prompt is spread over at most, as long as `most` allows it."""
_BACKLOG = 128
"""The same of all that waits: a burst needn't wait until the pace has risen to it."""
_SMALL_PADDING = 128
"""Rows; a step's weights have to be read for few rows as for many."""


class PromptPace:
    def __init__(self, most: int, least: int | None = None) -> None:
        """`most`: rows at most, whatever waits. `least`: rows that may always be taken, as many as a row costs least
        with; None: always `most`."""
        self.most = most
        self.least = most if least is None else min(least, most)
        self._of_late = 0.0

    def rows(self, first: int, waiting: int) -> int:
        """The bound of the next step. `first`: rows that the first prompt still lacks. `waiting`: those of all."""
        wanted = max(int(_AHEAD * self._of_late), first // _SHARES, waiting // _BACKLOG)
        return min(max(self.least, wanted), self.most)

    def took(self, rows: int) -> None:
        """Says how many a step got in which others decode."""
        self._of_late += (rows - self._of_late) / _STEPS


def filled(budget: int, wanted: int, num_decodes: int, most: int, sizes: Sequence[int]) -> int:
    """A budget of prompt rows, changed such that little of the step is padding.

    Args:
        wanted: prompt rows that could be taken. most: what the budget may become. sizes: rows, prompts' and decodes',
            that steps are padded to, ascending.
    """
    rows = num_decodes + min(wanted, budget)
    index = bisect.bisect_left(sizes, rows)
    if index in (0, len(sizes)) or sizes[index] == rows:
        return budget
    below, padded = sizes[index - 1 : index + 1]
    if wanted > budget and padded - rows <= rows - below and padded - num_decodes <= most:
        return padded - num_decodes
    # Where more is waiting anyway, the next step takes what this one leaves; else it is worth a step of its own only if
    # that saves much.
    cut = wanted > budget or padded - rows > max(rows // 8, _SMALL_PADDING)
    # But never so much that prompts hardly get on.
    return below - num_decodes if cut and 2 * (below - num_decodes) > rows - num_decodes else budget
