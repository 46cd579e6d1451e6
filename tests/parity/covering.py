"""Covering arrays: few scenarios in which nevertheless every two settings meet.

Most faults of an engine need two conditions at once (a preemption *and* overlap, embeddings *and* a chunk boundary);
a set that contains every pair of settings catches those at a fraction of the whole product.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Hashable, Mapping, Sequence

Row = dict[str, Hashable]


def all_rows(axes: Mapping[str, Sequence[Hashable]]) -> list[Row]:
    """The whole product."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def pairs_of(row: Row) -> set[frozenset[tuple[str, Hashable]]]:
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def pairwise(axes: Mapping[str, Sequence[Hashable]], seed: int = 0) -> list[Row]:
    """Rows of the product in which every pair of values of two axes occurs. Greedy: each row is the one that adds most
    pairs; `seed` decides between equals."""
    rows = all_rows(axes)
    random.Random(seed).shuffle(rows)
    missing = set().union(*map(pairs_of, rows))
    chosen: list[Row] = []
    while missing:
        best = max(rows, key=lambda row: len(pairs_of(row) & missing))
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen
