"""The Triton side of `runner.kernels.filters`: a search for each row's cut, without a sort.

One program a row; a row that doesn't ask ends at once. Two or three passes over the row find a lower bound of the cut
and collect the few tokens above it, and the search goes on among those. The bound comes from the lanes' maxima: that
each of k lanes has a token above x proves that the k-th best token is above x. Where no useful bound is found, or the
tokens above it are too many, the search goes through the whole row instead.

Logits are compared as integers in the same order. Probabilities, relative to the best token's, are summed as integers
of 2^-40, so a sum doesn't depend on the order of its terms.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runner.kernels._triton import tl, triton
from runner.kernels.filters import Floors
from runner.sampling_state import SamplingState

_BLOCK = 4096
_LIST_BLOCK = 1024
_LIST_SIZE = 4096
"""Tokens that are collected at most."""
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_UNIT = tl.constexpr(2.0**40)
_MAX_KEY = tl.constexpr(2**31 - 1)
_MIN_KEY = tl.constexpr(-(2**31))
"""Below the key of -inf: of no token."""
_LOWEST = tl.constexpr(-2139095041)
"""The key of -inf."""
_ALL = tl.constexpr(2**62)


@triton.jit
def _key_of(logit):  # type: ignore[no-untyped-def]
    """float32 to int32 in the same order; -0.0 like 0.0."""
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _logit_of(key):  # type: ignore[no-untyped-def]
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _mass_of(key, best, scale):  # type: ignore[no-untyped-def]
    """int64, in 2^-40: the token's probability over the best one's."""
    return (tl.exp2((_logit_of(key) - best) * scale) * _UNIT).to(tl.int64)


@triton.jit
def _between(low, high):  # type: ignore[no-untyped-def]
    """The middle of two int32, rounded down, without overflow."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def _load_keys(logits, tile, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tile + tl.arange(0, BLOCK)
    logit = tl.load(logits + place, mask=place < count, other=0.0).to(tl.float32)
    return tl.where(place < count, _key_of(logit), _MIN_KEY)


@triton.jit
def _weigh_at(logits, count, key, best, scale, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """(weight of what is above `key`, how many equal it)"""
    above = tl.zeros([BLOCK], tl.int64)
    equal = tl.zeros([BLOCK], tl.int32)
    for tile in range(0, count, BLOCK):
        keys = _load_keys(logits, tile, count, BLOCK)
        if BY_MASS:
            above += tl.where(keys > key, _mass_of(keys, best, scale), 0)
        else:
            above += (keys > key).to(tl.int64)
        equal += (keys == key).to(tl.int32)
    return tl.sum(above, 0), tl.sum(equal, 0)


@triton.jit
def _crossing(logits, count, target, low, high, best, scale, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """(key, weight above it): the highest key of which the tokens at and above it reach the target; `low` where none
    does. It is `low` at least and `high` at most. Halves the interval and moves both ends to keys that occur."""
    weight = tl.full([], 0, tl.int64)
    while low < high:
        middle = _between(low, high)
        heavy = tl.zeros([BLOCK], tl.int64)
        next_above = tl.full([BLOCK], _MAX_KEY, tl.int32)
        next_below = tl.full([BLOCK], _MIN_KEY, tl.int32)
        for tile in range(0, count, BLOCK):
            keys = _load_keys(logits, tile, count, BLOCK)
            is_above = keys > middle
            if BY_MASS:
                heavy += tl.where(is_above, _mass_of(keys, best, scale), 0)
            else:
                heavy += is_above.to(tl.int64)
            next_above = tl.minimum(next_above, tl.where(is_above, keys, _MAX_KEY))
            next_below = tl.maximum(next_below, tl.where(is_above, _MIN_KEY, keys))
        total = tl.sum(heavy, 0)
        if total >= target:
            low = tl.min(next_above, 0)
        else:
            high = tl.maximum(tl.max(next_below, 0), low)
            weight = total
    return low, weight


@triton.jit
def _last_of(logits, ids, count, key, keep, vocab_size, LISTED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The keep-th lowest id of the tokens with this key."""
    low = 0
    high = vocab_size - 1
    while low < high:
        middle = (low + high) // 2
        reached = tl.zeros([BLOCK], tl.int32)
        for tile in range(0, count, BLOCK):
            keys = _load_keys(logits, tile, count, BLOCK)
            place = tile + tl.arange(0, BLOCK)
            token = place
            if LISTED:
                token = tl.load(ids + place, mask=place < count, other=0)
            reached += ((keys == key) & (token <= middle)).to(tl.int32)
        if tl.sum(reached, 0) >= keep:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def _cut(  # type: ignore[no-untyped-def]
    logits, ids, count, top_k, top_p, low, best, best_key, scale, total, vocab_size,
    LISTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(key, last id) of the cut among `count` logits of which every one that may stay is one.

    low: the key that min_p asks for. total: the mass before top_p, or -1: of what top_k leaves of these logits.
    """
    key = low
    keep = tl.full([], _ALL, tl.int64)
    if top_k > 0:
        key, above = _crossing(logits, count, top_k.to(tl.int64), low, best_key, best, scale, False, BLOCK)
        keep = top_k.to(tl.int64) - above
    if top_p < 1:
        if total < 0:
            above, equal = _weigh_at(logits, count, key, best, scale, True, BLOCK)
            total = above + tl.minimum(keep, equal.to(tl.int64)) * _mass_of(key, best, scale)
        target = tl.maximum((total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64), 1)
        crossing, above = _crossing(logits, count, target, key, best_key, best, scale, True, BLOCK)
        mass = tl.maximum(_mass_of(crossing, best, scale), 1)
        needed = (target - above + mass - 1) // mass
        keep = tl.where(crossing == key, tl.minimum(keep, needed), needed)
        key = crossing
    last = tl.full([], _MAX_KEY, tl.int32)
    if keep < _ALL:
        _, equal = _weigh_at(logits, count, key, best, scale, False, BLOCK)
        if equal > keep:
            last = _last_of(logits, ids, count, key, keep, vocab_size, LISTED, BLOCK)
    return key, last


@triton.jit
def _floors_kernel(  # type: ignore[no-untyped-def]
    logits, logits_stride, slot, floats, ints, num_slots, floors, lasts, list_logits, list_ids,
    vocab_size, LIST_SIZE: tl.constexpr, LIST_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    index = tl.load(slot + row).to(tl.int64)
    heat = tl.load(floats + index)
    top_p = tl.load(floats + num_slots + index)
    min_p = tl.load(floats + 2 * num_slots + index)
    top_k = tl.load(ints + index)
    key = tl.full([], _MIN_KEY, tl.int32)
    last = tl.full([], _MAX_KEY, tl.int32)
    floor = tl.full([], float("-inf"), tl.float32)
    if (heat > 0) & ((top_p < 1) | (top_k > 0) | (min_p > 0)):
        logits += row * logits_stride
        scale = tl.minimum(tl.div_rn(_LOG2_E, heat), 1e30)
        lane_best = tl.full([BLOCK], _MIN_KEY, tl.int32)
        for tile in tl.range(0, vocab_size, BLOCK, num_stages=3):
            lane_best = tl.maximum(lane_best, _load_keys(logits, tile, vocab_size, BLOCK))
        best_key = tl.max(lane_best, 0)
        best = _logit_of(best_key)
        low = tl.full([], _LOWEST, tl.int32)
        if min_p > 0:
            low = _key_of(tl.minimum(best + heat * (tl.log2(min_p) * _LN_2), best))
        key = low
        if (top_k > 0) | (top_p < 1):
            # The mass of everything is only needed, and only right, where nothing comes before top_p.
            total = tl.full([], -1, tl.int64)
            lane_weight = tl.full([BLOCK], 1.0, tl.float32)
            target = top_k.to(tl.float32)
            if (top_k <= 0) & (min_p <= 0):
                lane_mass = tl.zeros([BLOCK], tl.float32)
                for tile in tl.range(0, vocab_size, BLOCK, num_stages=3):
                    keys = _load_keys(logits, tile, vocab_size, BLOCK)
                    mass = tl.exp2((_logit_of(keys) - best) * scale)
                    lane_mass += tl.where(keys > _LOWEST, mass, 0.0)
                mass = tl.sum(lane_mass, 0)
                total = (mass * _UNIT).to(tl.int64)
                target = mass * top_p
                lane_weight = tl.where(lane_best > _LOWEST, tl.exp2((_logit_of(lane_best) - best) * scale), 0.0)
            bound = low
            if (top_k > 0) | (min_p <= 0):
                high = best_key
                for _ in range(20):
                    middle = _between(bound, high)
                    reached = tl.sum(tl.where(lane_best >= middle, lane_weight, 0.0), 0) >= target
                    bound = tl.where(reached, middle, bound)
                    high = tl.where(reached, high, middle)
            # Collect what is not below the bound, in the order of the ids.
            list_logits += row * LIST_SIZE
            list_ids += row * LIST_SIZE
            count = 0
            for tile in tl.range(0, vocab_size, BLOCK, num_stages=3):
                keys = _load_keys(logits, tile, vocab_size, BLOCK)
                taken = (keys >= bound).to(tl.int32)
                place = count + tl.cumsum(taken, 0) - 1
                here = (taken > 0) & (place < LIST_SIZE)
                tl.store(list_logits + place, _logit_of(keys), mask=here)
                tl.store(list_ids + place, tile + tl.arange(0, BLOCK), mask=here)
                count += tl.sum(taken, 0)
            tl.debug_barrier()  # a lane reads what others have written
            if count <= LIST_SIZE:
                key, last = _cut(
                    list_logits, list_ids, count, top_k, top_p, low, best, best_key, scale, total, vocab_size,
                    True, LIST_BLOCK,
                )  # fmt: skip
            else:
                key, last = _cut(
                    logits, list_ids, vocab_size, top_k, top_p, low, best, best_key, scale, total, vocab_size,
                    False, BLOCK,
                )  # fmt: skip
        floor = _logit_of(key)
    tl.store(floors + row, floor)
    tl.store(lasts + row, last)


def filter_floors_triton(logits: Tensor, slot: Tensor, sampling: SamplingState) -> Floors:
    num_rows, vocab_size = logits.shape
    if logits.stride(1) != 1 or not all(t.is_contiguous() for t in (slot, sampling.floats, sampling.ints)):
        raise ValueError("the kernel reads contiguous rows and parameters")
    value = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    last = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if num_rows:
        size = min(_LIST_SIZE, triton.next_power_of_2(vocab_size))
        list_logits = torch.empty(num_rows, size, dtype=torch.float32, device=logits.device)
        list_ids = torch.empty(num_rows, size, dtype=torch.int32, device=logits.device)
        block = min(_BLOCK, triton.next_power_of_2(vocab_size))
        _floors_kernel[(num_rows,)](
            logits, logits.stride(0), slot, sampling.floats, sampling.ints, sampling.ints.shape[1], value, last,
            list_logits, list_ids, vocab_size,
            LIST_SIZE=size, LIST_BLOCK=min(_LIST_BLOCK, block), BLOCK=block,
            num_warps=16, maxnreg=64,  # two programs fit a multiprocessor: a row more to load while one computes
        )  # fmt: skip
    return Floors(value, last)
