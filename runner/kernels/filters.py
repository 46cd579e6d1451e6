"""min_p, top_k and top_p: where each row's distribution is cut off.

Called by `runner.sampler` for steps in which somebody filters. A row's tokens are ordered by logit, equal ones by id,
the lowest first. Each filter keeps a beginning of that order, so what all of them leave can be said in two numbers,
which the choice then compares with: the logits stay as they are.

    min_p   (Nguyen et al. 2024, arXiv:2407.01082) keeps logits of at least best + temperature * ln(min_p);
    top_k   then keeps the first k;
    top_p   (Holtzman et al. 2019, arXiv:1904.09751) then keeps a token while the probability of those before it, among
            what is left and at the row's temperature, is short of top_p: the one that crosses the line stays.

The first token of the order always stays. Of equal logits at the cut the lowest ids stay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runner.sampling_state import SamplingState

NO_LAST = 2**31 - 1
_FEW = (128, 2048)
"""So many best tokens of a row the reference looks at before it sorts all of them."""


@dataclass(frozen=True)
class Floors:
    """Token t of row i stays where its logit is above `value[i]`, or equals it and t <= `last[i]`."""

    value: Tensor
    """[N] float32; -inf where nothing is filtered."""
    last: Tensor
    """[N] int32"""


def filter_floors(logits: Tensor, slot: Tensor, sampling: SamplingState) -> Floors:
    """Rows that don't ask for a filter, or are greedy, do no work.

    Args:
        logits: [N, vocab], any float dtype. slot: [N] int32 or int64: whose parameters row i takes.
    """
    if logits.is_cuda:
        from runner.kernels.filters_triton import filter_floors_triton

        return filter_floors_triton(logits, slot, sampling)
    return filter_floors_reference(logits, slot, sampling)


def filter_floors_reference(logits: Tensor, slot: Tensor, sampling: SamplingState) -> Floors:
    temperature, top_p, min_p = sampling.floats[:3, slot.long()].unbind(0)
    top_k = sampling.ints[0, slot.long()]
    value = torch.full_like(temperature, -torch.inf)
    last = torch.full_like(top_k, NO_LAST)
    asking = ((temperature > 0) & ((top_p < 1) | (top_k > 0) | (min_p > 0))).nonzero()[:, 0]
    for few in (*_FEW, logits.shape[1]):
        if len(asking) == 0:
            break
        rows = logits[asking].float()
        few = min(few, rows.shape[1])
        best = rows.topk(few, dim=-1).values if few in _FEW else rows.sort(dim=-1, descending=True).values
        kept = _count_kept(rows, best, temperature[asking], top_k[asking], top_p[asking], min_p[asking])
        found = (kept < few) | (few == rows.shape[1])
        value[asking[found]], last[asking[found]] = _cut_after(rows[found], best[found], kept[found])
        asking = asking[~found]
    return Floors(value, last)


def _count_kept(rows: Tensor, best: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """[N] int64: how many of the `best` (of each row, descending) stay. Right where that isn't all of them, or where
    they are the whole row."""
    peak, heat = best[:, :1], temperature[:, None]
    rank = torch.arange(best.shape[1], device=best.device)
    drop = best < peak + heat * torch.log(min_p)[:, None]
    drop |= (top_k[:, None] > 0) & (rank >= top_k[:, None])
    if bool((top_p < 1).any()):
        mass = ((best - peak) / heat).exp_().double().masked_fill_(drop, 0.0)
        before = mass.cumsum(-1) - mass
        left = mass.sum(-1, keepdim=True)
        uncut = ~drop[:, -1:]
        if best.shape[1] < rows.shape[1] and bool(uncut.any()):  # then more than these are left
            left = torch.where(uncut, ((rows - peak) / heat).exp_().sum(-1, keepdim=True).double(), left)
        drop |= (before >= top_p[:, None].double() * left) & (top_p < 1)[:, None]
    drop[:, 0] = False
    return (~drop).sum(-1)


def _cut_after(rows: Tensor, best: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """(floor, last id) that leave so many of the best."""
    floor = best.gather(1, kept[:, None] - 1)
    last = torch.full_like(kept, NO_LAST, dtype=torch.int32)
    ties = kept - (best > floor).sum(-1)
    equal = rows == floor
    split = (equal.view(torch.uint8).sum(-1, dtype=torch.int32) > ties).nonzero()[:, 0]
    if len(split):
        reached = equal[split].cumsum(-1) >= ties[split, None]
        last[split] = reached.int().argmax(-1).int()
    return floor[:, 0], last


def apply_floors(logits: Tensor, floors: Floors) -> Tensor:
    """[N, vocab] float32, -inf at what is filtered."""
    token = torch.arange(logits.shape[1], device=logits.device, dtype=torch.int32)
    floor = floors.value[:, None]
    stays = (logits > floor) | ((logits == floor) & (token <= floors.last[:, None]))
    return logits.float().masked_fill(~stays, -torch.inf)
