"""Attention of decodes on the CPU: each entry's one row over its sequence's cached rows.

Called by `runner.attention.cpu_attention`; `runner.attention.sdpa` is its reference. A thread takes whole heads: scores
of all rows first, then their softmax, then the values' sum; all in float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from runner.attention.backend import AttentionBatch
from runner.kernels._numba import (
    FLOAT,
    INT,
    Kernel,
    Scratch,
    exp,
    fork,
    helper,
    long_kernel,
    narrow,
    prefetch,
    rows,
    team,
    wide,
)

_NEGLIGIBLE = np.float32(-60)
"""A score that far below the highest adds nothing to a float32. Denormal numbers would come of it, which are slow."""


@helper
def _widen(source: Any, head: int, out: Any) -> None:
    """One head's rows of a block, as float32. source: [n, kv_heads, head_dim]; out: [>= n, head_dim]."""
    for j in range(len(source)):
        for i in range(out.shape[1]):
            out[j, i] = wide(source[j, head, i])


@helper
def _scores(query: Any, keys: Any, count: int, out: Any) -> None:
    """out[j] = query . keys[j], of the first `count` keys."""
    whole = count // 4 * 4
    for j in range(0, whole, 4):
        a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        for i in range(len(query)):
            a += query[i] * keys[j, i]
            b += query[i] * keys[j + 1, i]
            c += query[i] * keys[j + 2, i]
            d += query[i] * keys[j + 3, i]
        out[j], out[j + 1], out[j + 2], out[j + 3] = a, b, c, d
    for j in range(whole, count):
        a = np.float32(0)
        for i in range(len(query)):
            a += query[i] * keys[j, i]
        out[j] = a


@helper
def _add_values(weights: Any, values: Any, count: int, out: Any) -> None:
    """out += the sum of weights[j] * values[j], of the first `count` values."""
    whole = count // 4 * 4
    for j in range(0, whole, 4):
        a, b, c, d = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
        for i in range(len(out)):
            out[i] += (a * values[j, i] + b * values[j + 1, i]) + (c * values[j + 2, i] + d * values[j + 3, i])
    for j in range(whole, count):
        for i in range(len(out)):
            out[i] += weights[j] * values[j, i]


@helper
def _softmax(scores: Any, softcap: Any) -> None:
    """In place."""
    if softcap > 0:
        for j in range(len(scores)):
            # tanh(x) = 1 - 2 / (exp(2x) + 1)
            power = exp(np.float32(2) * scores[j] / softcap)
            scores[j] = softcap * (np.float32(1) - np.float32(2) / (power + np.float32(1)))
    highest = scores[0]
    for j in range(len(scores)):
        highest = max(highest, scores[j])
    total = np.float32(0)
    for j in range(len(scores)):
        below = scores[j] - highest
        scores[j] = exp(below) if below > _NEGLIGIBLE else np.float32(0)
        total += scores[j]
    factor = np.float32(1) / total
    for j in range(len(scores)):
        scores[j] *= factor


@helper
def _pass(tag: Any, cache: int, blocks: Any, begin: int, length: int, shape: Any, heads: Any, vectors: Any, scores: Any,
          block: Any, are_values: bool) -> None:  # fmt: skip
    """Once over a sequence's cached rows, from `begin` to `length`: scores from the keys, or values by their weights.

    Block by block, all heads of each, so that memory is read in the order in which it lies.

    Args:
        shape: (block_size, kv_heads, head_dim, query heads that share a KV head).
        heads: (first, end) of the query's heads that this thread has.
        vectors: [heads, head_dim], the queries, or what values are added to.
        scores: [heads, rows]. block: [block_size, head_dim], to work in.
    """
    block_size, kv_heads, head_dim, group = shape
    row_bytes = kv_heads * head_dim * rows(tag, cache, 1).itemsize
    position = begin
    while position < length:
        offset = position % block_size
        count = min(block_size - offset, length - position)
        place = cache + (np.int64(blocks[position // block_size]) * block_size + offset) * row_bytes
        if position + count < length:
            following = np.int64(blocks[(position + count) // block_size])
            prefetch(cache + following * block_size * row_bytes, block_size * row_bytes)
        cached = rows(tag, place, (count, kv_heads, head_dim))
        for kv_head in range(heads[0] // group, (heads[1] - 1) // group + 1):
            _widen(cached, kv_head, block)
            for head in range(max(heads[0], kv_head * group), min(heads[1], (kv_head + 1) * group)):
                if are_values:
                    _add_values(scores[head][position - begin :], block, count, vectors[head])
                else:
                    _scores(vectors[head], block, count, scores[head][position - begin :])
        position += count


@helper
def _attend_heads(thread: int, threads: int, tag: Any, query: int, keys: int, values: int, table: int,
                  table_width: int, slots: int, seq_lens: int, out: int, scratch: int, scratch_size: int, longest: int,
                  num_entries: int, heads: int, kv_heads: int, head_dim: int, block_size: int, window: int,
                  scale: float, softcap: float) -> None:  # fmt: skip
    """A thread's share of all entries' heads."""
    size = rows(tag, query, 1).itemsize
    slot, lengths = rows(INT, slots, num_entries), rows(INT, seq_lens, num_entries)
    scratch += thread * scratch_size * 4
    both = rows(FLOAT, scratch, (2, heads, head_dim))
    wanted, summed = both[0], both[1]
    block = rows(FLOAT, scratch + 2 * heads * head_dim * 4, (block_size, head_dim))
    scores = rows(FLOAT, scratch + (2 * heads + block_size) * head_dim * 4, (heads, longest))
    shape = (block_size, kv_heads, head_dim, heads // kv_heads)
    work = 0
    for entry in range(num_entries):
        work += _cost(lengths[entry], window)
    first, last = work * heads * thread // threads, work * heads * (thread + 1) // threads
    done = 0
    for entry in range(num_entries):
        length = np.int64(lengths[entry])
        cost = _cost(length, window)
        first_head = min(max(first - done + cost - 1, 0) // cost, heads)
        end_head = min(max(last - done + cost - 1, 0) // cost, heads)
        done += cost * heads
        if first_head >= end_head:
            continue
        begin = max(np.int64(0), length - window) if window else np.int64(0)
        blocks, mine = rows(INT, table + slot[entry] * table_width * 4, table_width), (first_head, end_head)
        place = entry * heads * head_dim * size
        source, target = rows(tag, query + place, (heads, head_dim)), rows(tag, out + place, (heads, head_dim))
        for head in range(first_head, end_head):
            for i in range(head_dim):
                wanted[head, i], summed[head, i] = wide(source[head, i]) * np.float32(scale), np.float32(0)
        _pass(tag, keys, blocks, begin, length, shape, mine, wanted, scores, block, False)
        for head in range(first_head, end_head):
            _softmax(scores[head][: length - begin], np.float32(softcap))
        _pass(tag, values, blocks, begin, length, shape, mine, summed, scores, block, True)
        for head in range(first_head, end_head):
            for i in range(head_dim):
                target[head, i] = narrow(tag, summed[head, i])


@helper
def _cost(length: int, window: int) -> int:
    """Of one head, in cached rows; what it costs whatever their number is some 16 of them."""
    return (min(length, window) if window else length) + 16


@long_kernel
def _attend(tag: Any, team: int, query: int, keys: int, values: int, table: int, table_width: int, slots: int,
            seq_lens: int, out: int, scratch: int, scratch_size: int, longest: int, num_entries: int, heads: int,
            kv_heads: int, head_dim: int, block_size: int, window: int, scale: float,
            softcap: float) -> None:  # fmt: skip
    fork(team, _attend_heads, (tag, query, keys, values, table, table_width, slots, seq_lens, out, scratch,
                               scratch_size, longest, num_entries, heads, kv_heads, head_dim, block_size, window,
                               scale, softcap))  # fmt: skip


_scratch = Scratch()
DECODE_ATTENTION = Kernel(_attend, "i" * 18 + "ff")


def attend_decodes_cpu(query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch, out: Tensor, *,
                       scale: float, window: int | None, softcap: float | None) -> None:  # fmt: skip
    """Fills the rows of the batch's decodes in `out`. query, out: [T, heads, head_dim], contiguous."""
    _, block_size, kv_heads, head_dim = key_cache.shape
    table, decodes = batch.block_table, batch.num_decodes
    heads, longest = query.shape[1], max(batch.host_seq_lens[:decodes])
    size = (2 * heads + block_size) * head_dim + heads * longest
    DECODE_ATTENTION(
        query.dtype, team(), query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), table.data_ptr(),
        table.shape[1], batch.entry_slots.data_ptr(), batch.seq_lens.data_ptr(), out.data_ptr(),
        _scratch.address(size), size, longest, decodes, heads, kv_heads, head_dim, block_size, window or 0, scale,
        softcap or 0.0,
    )  # fmt: skip
