"""Pearson's test: could these draws have come from that distribution?"""

from __future__ import annotations

import torch
from torch import Tensor


def p_value(draws: Tensor, probabilities: Tensor) -> float:
    """How probable it is that draws from `probabilities` ([n], summing to 1) fit it as badly as these ([m] int64), or
    worse. 0 where something impossible was drawn.

    What is expected fewer than five times is counted together, as usual; the statistic is not chi-square there.
    """
    counts = torch.bincount(draws, minlength=len(probabilities)).double()
    if counts[probabilities == 0].any():
        return 0.0
    expected = probabilities.double() * len(draws)
    frequent = expected >= 5
    bins = torch.cat([expected[frequent], expected[~frequent].sum()[None]])
    seen = torch.cat([counts[frequent], counts[~frequent].sum()[None]])
    bins, seen = bins[bins > 0], seen[bins > 0]
    statistic = ((seen - bins) ** 2 / bins).sum()
    degrees = torch.tensor(max(len(bins) - 1, 1)).double()
    return float(torch.special.gammaincc(degrees / 2, statistic / 2))
