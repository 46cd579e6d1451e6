"""A piece of a tile of attention on the CPU: some queries over some cached rows of their sequence.

Called by `attention_cpu`, which says what tiles and pieces are. The cached rows are taken in spans of 64, whose keys
and values are laid out for `tile_cpu.tile_product`. Scores, softmax and sums are float32; only the weights are rounded
to bfloat16 where the values are bfloat16, as in torch's SDPA.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from runner.kernels._numba import (
    FLOAT,
    INT,
    LONG,
    bits_of,
    exp,
    float_of,
    helper,
    is_bfloat,
    narrow,
    prefetch,
    rows,
    wide,
)
from runner.kernels.tile_cpu import TILE_COLUMNS, TILE_ROWS, tile_product, transpose_words

SPAN = TILE_COLUMNS
"""Cached rows at a time."""
_TILE_QUERIES = 30
"""Queries (a row's head each) of a tile, unless a single row has more."""
_NEGLIGIBLE = np.float32(-60)
"""A score that far below the highest adds nothing to a float32. Denormal numbers would come of it, which are slow."""
_LOWEST = np.float32(-3e38)


@helper
def _lay_queries(tag: Any, source: int, count: int, out: int) -> None:
    """Values as they are multiplied: bfloat16 as it is, all else as float32."""
    given = rows(tag, source, count)
    if is_bfloat(tag):
        same = rows(tag, out, count)
        for i in range(count):
            same[i] = given[i]
    else:
        widened = rows(FLOAT, out, count)
        for i in range(count):
            widened[i] = wide(given[i])


@helper
def _lay_keys(tag: Any, base: int, places: int, count: int, head_dim: int, out: int) -> None:
    """A span's keys as `tile_product`'s columns: word by word, those of all rows side by side."""
    size = rows(tag, base, 1).itemsize
    place, words = rows(LONG, places, SPAN), head_dim * size // 4
    if (is_bfloat(tag) or size == 4) and words >= 16:
        for first in range(0, count, 16):
            transpose_words(base, places + first * 8, words, out + first * 4)
    elif is_bfloat(tag):
        by_word = rows(INT, out, (words, SPAN))
        for j in range(count):
            key = rows(INT, base + place[j], words)
            for i in range(words):
                by_word[i, j] = key[i]
    else:
        by_value = rows(FLOAT, out, (head_dim, SPAN))
        for j in range(count):
            values = rows(tag, base + place[j], head_dim)
            for i in range(head_dim):
                by_value[i, j] = wide(values[i])


@helper
def _lay_values(tag: Any, base: int, places: int, count: int, head_dim: int, out: int) -> None:
    """A span's values as `tile_product`'s columns, 64 of them after another: row by row, or pair by pair of rows."""
    place, size = rows(LONG, places, SPAN), rows(tag, base, 1).itemsize
    for first in range(0, head_dim, TILE_COLUMNS):
        width, to = min(TILE_COLUMNS, head_dim - first), out + first * SPAN * 4
        if is_bfloat(tag):
            pairs = rows(INT, to, (SPAN // 2, TILE_COLUMNS))
            for j in range((count + 1) // 2):
                both, one = pairs[j], rows(tag, base + place[2 * j] + first * size, width)
                if 2 * j + 1 < count:
                    two = rows(tag, base + place[2 * j + 1] + first * size, width)
                    for i in range(width):
                        both[i] = np.int32(np.uint32(one[i]) | np.uint32(two[i]) << np.uint32(16))
                else:
                    for i in range(width):
                        both[i] = np.int32(one[i])
        else:
            singles = rows(FLOAT, to, (SPAN, TILE_COLUMNS))
            for j in range(count):
                value = rows(tag, base + place[j] + first * size, width)
                for i in range(width):
                    singles[j, i] = wide(value[i])


@helper
def _weigh(tag: Any, scores: Any, begin: int, end: int, highest: Any, weights: int) -> Any:
    """Scores to weights below the highest, in the tag's layout; outside of `begin` to `end` they are 0. Their sum."""
    total = np.float32(0)
    for j in range(len(scores)):
        below = scores[j] - highest
        weight = exp(below) if below > _NEGLIGIBLE else np.float32(0)
        weight = weight if begin <= j and j < end else np.float32(0)
        scores[j] = weight
        total += weight
    if is_bfloat(tag):
        rounded = rows(tag, weights, SPAN)
        for j in range(len(scores)):
            rounded[j] = narrow(tag, scores[j])
    else:
        same = rows(FLOAT, weights, SPAN)
        for j in range(len(scores)):
            same[j] = scores[j]
    return total


@helper
def _highest(scores: Any, begin: int, end: int) -> Any:
    """Of the scores from `begin` to `end`. By their bits as whole numbers in the same order, which is vectorised."""
    top = bits_of(_LOWEST)
    best = np.int32(top) ^ np.int32(0x7FFFFFFF)
    for j in range(begin, end):
        bits = np.int32(bits_of(scores[j]))
        best = max(best, bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))
    return float_of(np.uint32(best ^ ((best >> np.int32(31)) & np.int32(0x7FFFFFFF))))


@helper
def _cap(scores: Any, count: int, scale: Any, softcap: Any) -> None:
    for j in range(count):
        scores[j] *= scale
    if softcap > 0:
        for j in range(count):
            # tanh(x) = 1 - 2 / (exp(2x) + 1)
            power = exp(np.float32(2) * scores[j] / softcap)
            scores[j] = softcap * (np.float32(1) - np.float32(2) / (power + np.float32(1)))


@helper
def _multiply(tag: Any, count: int, columns: int, x: int, x_stride: int, steps: int, out: int, out_stride: int,
              more: int) -> None:  # fmt: skip
    """`tile_product` of any number of rows, of float32 results."""
    for first in range(0, count, TILE_ROWS):
        tile_product(tag, min(TILE_ROWS, count - first), columns, x + first * x_stride, x_stride, steps,
                     out + first * out_stride, out_stride, more, 0, 0)  # fmt: skip


@helper
def _padded(head_dim: int) -> int:
    return (head_dim + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS


@helper
def tile_rows(group: int) -> int:
    """Rows of a tile, at most, by the query heads of a KV head."""
    return max(_TILE_QUERIES // group, 1)


@helper
def work_values(group: int, head_dim: int) -> Any:
    """float32 that a thread works in, and some to begin at a cache line."""
    queries, padded = tile_rows(group) * group, _padded(head_dim)
    return 4 * SPAN + queries * (head_dim + 2 * SPAN + padded + 2) + 2 * SPAN * padded + 64


@helper
def piece_values(group: int, head_dim: int) -> Any:
    """float32 that a piece leaves: sums, then its highest scores and totals."""
    return tile_rows(group) * group * (_padded(head_dim) + 2)


@helper
def _find(table: int, first: int, count: int, block_size: int, row_bytes: int, places: int) -> None:
    """Where a sequence's cached rows are, from `first` on, in bytes from those of block 0; `SPAN` of them, of which
    those beyond `count` repeat the last. `table`: address of the numbers of its blocks."""
    place, number = rows(LONG, places, SPAN), first // block_size
    offset, found = first - number * block_size, 0
    while found < count:
        there = np.int64(rows(INT, table + number * 4, 1)[0]) * block_size + offset
        run = min(block_size - offset, count - found)
        for j in range(run):
            place[found + j] = (there + j) * row_bytes
        found, number, offset = found + run, number + 1, 0
    for j in range(count, SPAN):
        place[j] = place[count - 1]


@helper
def _ask(base: int, places: int, count: int, size: int) -> None:
    """Asks the memory for a span's keys or values."""
    place = rows(LONG, places, SPAN)
    for j in range(count):
        prefetch(base + place[j], size)


@helper
def first_seen(position: int, window: int) -> Any:
    return max(np.int64(0), position - window + 1) if window else np.int64(0)


@helper
def attend_piece(tag: Any, query: int, keys: int, values: int, table: int, next_keys: int, next_table: int,
                 next_first: int, next_count: int, asked: int, out: int, left: int, scratch: int, num_rows: int,
                 position: int, first: int, end: int, heads: int, kv_heads: int, head_dim: int, block_size: int,
                 window: int, scale: float, softcap: float) -> None:  # fmt: skip
    """`query` and `out`: of the first row and of the group's first head. keys, values: of the KV head, block 0.
    `position`: of the first row. first, end: the cached rows of this piece. `left`: 0 where it is all of its tile, else
    where to leave what `merge_pieces` needs. `asked`: bytes of a cached row to ask the memory for, which is all heads'
    at the first, and nothing then. next_...: what will be read after this piece, of all heads; no rows where that is
    known."""
    size, group, padded = rows(tag, query, 1).itemsize, heads // kv_heads, _padded(head_dim)
    count, word, row_bytes = num_rows * group, (2 if is_bfloat(tag) else 4), heads * head_dim * size
    # The parts of the scratch: places of a span's rows, keys and values laid out, queries, scores, weights, sums.
    places = scratch
    following = places + SPAN * 8
    key_columns = following + SPAN * 8
    value_columns = key_columns + SPAN * padded * 4
    queries = value_columns + SPAN * padded * 4
    scores_at = queries + count * head_dim * 4
    weights = scores_at + count * SPAN * 4
    sums_at = left or weights + count * SPAN * 4
    scores, sums = rows(FLOAT, scores_at, (count, SPAN)), rows(FLOAT, sums_at, (count, padded))
    state = rows(FLOAT, sums_at + count * padded * 4, (2, count))
    highest, total = state[0], state[1]
    for row in range(num_rows):
        _lay_queries(tag, query + row * row_bytes, group * head_dim, queries + row * group * head_dim * word)
    highest[:], total[:] = _LOWEST, np.float32(0)
    sums[:] = np.float32(0)
    cached_bytes = kv_heads * head_dim * size
    _find(table, first, min(SPAN, end - first), block_size, cached_bytes, places)
    while first < end:
        length = min(SPAN, end - first)
        _ask(values, places, length, asked)
        _lay_keys(tag, keys, places, length, head_dim, key_columns)
        _multiply(tag, count, key_columns, queries, head_dim * word, head_dim * word // 4, scores_at, SPAN * 4, 0)
        if first + length < end:
            more = min(SPAN, end - first - length)
            _find(table, first + length, more, block_size, cached_bytes, following)
            _ask(keys, following, more, asked)
        elif next_count:
            _find(next_table, next_first, next_count, block_size, cached_bytes, following)
            _ask(next_keys, following, next_count, cached_bytes)
        for q in range(count):
            at = position + q // group
            begin, stop = max(np.int64(0), first_seen(at, window) - first), min(length, at + 1 - first)
            _cap(scores[q], length, np.float32(scale), np.float32(softcap))
            top = max(highest[q], _highest(scores[q], begin, stop))
            factor = exp(highest[q] - top)
            highest[q] = top
            total[q] = total[q] * factor + _weigh(tag, scores[q], begin, stop, top, weights + q * SPAN * word)
            if factor < np.float32(1):
                for i in range(head_dim):
                    sums[q, i] *= factor
        _lay_values(tag, values, places, length, head_dim, value_columns)
        steps = (length + 1) // 2 if is_bfloat(tag) else length
        for column in range(0, head_dim, TILE_COLUMNS):
            _multiply(tag, count, value_columns + column * SPAN * 4, weights, SPAN * word, steps,
                      sums_at + column * 4, padded * 4, 1)  # fmt: skip
        first += length
        places, following = following, places
    if left:
        return
    for q in range(count):
        target = rows(tag, out + q // group * row_bytes + q % group * head_dim * size, head_dim)
        factor = np.float32(1) / total[q]
        for i in range(head_dim):
            target[i] = narrow(tag, sums[q, i] * factor)


@helper
def merge_pieces(tag: Any, pieces: int, num_pieces: int, stride: int, out: int, num_rows: int, heads: int, group: int,
                 head_dim: int) -> None:  # fmt: skip
    """What a tile's pieces left, `stride` bytes from one to the next, to what the whole tile would have given."""
    size, padded, count = rows(tag, out, 1).itemsize, _padded(head_dim), num_rows * group
    for q in range(count):
        top = _LOWEST
        for n in range(num_pieces):
            top = max(top, rows(FLOAT, pieces + n * stride + count * padded * 4, count)[q])
        sums, total = rows(FLOAT, pieces, (count, padded))[q], np.float32(0)
        for n in range(num_pieces):
            state = rows(FLOAT, pieces + n * stride + count * padded * 4, (2, count))
            factor, of_piece = exp(state[0, q] - top), rows(FLOAT, pieces + n * stride, (count, padded))[q]
            total += state[1, q] * factor
            if n == 0:
                for i in range(head_dim):
                    sums[i] *= factor
            else:
                for i in range(head_dim):
                    sums[i] += of_piece[i] * factor
        target = rows(tag, out + (q // group * heads + q % group) * head_dim * size, head_dim)
        factor = np.float32(1) / total
        for i in range(head_dim):
            target[i] = narrow(tag, sums[i] * factor)


__all__ = ["SPAN", "attend_piece", "first_seen", "merge_pieces", "piece_values", "tile_rows", "work_values"]
