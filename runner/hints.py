"""Hints: which token an embedding row stands for, if its client says so. Only counts and log-probabilities look at it.

A slot's table holds a hint in the row's own place, as a negative number, counted down from `FIRST_HINT`. (Between that
and `EMBEDDING_ID` are the ends of two-way spans: `slots`.) So a row is an embedding exactly if its number is negative,
and a hint needs no table of its own. Written by `sequence`, read by `kernels.penalties` and the scoring of prompts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from runner.messages import EMBEDDING_ID

if TYPE_CHECKING:
    from torch import Tensor  # requests are received before torch is imported

FIRST_HINT = -(1 << 30)
"""What stands for token 0. No prompt is as long, and no vocabulary as large, as that."""


def hinted_ids(hints: NDArray[np.int32]) -> NDArray[np.int32]:
    """What the slots hold at embedding rows. `hints`: int32, `EMBEDDING_ID` where there is none."""
    return np.where(hints == EMBEDDING_ID, hints, FIRST_HINT - hints).astype(np.int32)


def counted_ids(ids: Tensor) -> Tensor:
    """A slot's ids with hints as ids; negative where there is none. `ids`: int32 or int64."""
    return (FIRST_HINT - ids).where(ids <= FIRST_HINT, ids)
