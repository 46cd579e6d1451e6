"""Covering arrays: few scenarios in which nevertheless every few settings meet.

Most faults of an engine need two or three conditions at once (a preemption *and* overlap, embeddings *and* a chunk
boundary *and* a warm cache); a set that contains every such combination catches them at a fraction of the whole
product.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Hashable, Mapping, Sequence

Row = dict[str, Hashable]
Combination = frozenset[tuple[str, Hashable]]


def all_rows(axes: Mapping[str, Sequence[Hashable]]) -> list[Row]:
    """The whole product."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def combinations_of(row: Row, strength: int) -> set[Combination]:
    return {frozenset(combination) for combination in itertools.combinations(row.items(), strength)}


def covering(axes: Mapping[str, Sequence[Hashable]], strength: int, seed: int = 0) -> list[Row]:
    """Rows of the product in which every combination of values of any `strength` axes occurs.

    Greedy: each row is the one that adds most combinations; `seed` decides between equals.
    """
    rows = all_rows(axes)
    random.Random(seed).shuffle(rows)
    of_row = [(row, combinations_of(row, strength)) for row in rows]
    missing = set().union(*(combinations for _, combinations in of_row))
    chosen: list[Row] = []
    while missing:
        best, covered = max(of_row, key=lambda pair: len(pair[1] & missing))
        chosen.append(best)
        missing -= covered
    return chosen
