"""Paged attention on the CPU, of decodes and of chunks of prompts alike.

Called by `runner.attention.cpu_attention` and, as one part of a whole forward, by `decoder_cpu`;
`runner.attention.sdpa` is its reference. A tile is some rows of one sequence, and of these the query heads that share
one KV head. Threads take tiles, but those that cost much more than others are cut along the cached rows that they see
(as Flash-Decoding does, Dao et al., 2023) and their pieces merged by the threads once all are there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.attention.backend import AttentionBatch
from runner.kernels._numba import INT, LONG, Kernel, Scratch, fork, helper, long_kernel, rows, team
from runner.kernels.attention_piece_cpu import (
    SPAN,
    attend_piece,
    first_seen,
    merge_pieces,
    piece_values,
    tile_rows,
    work_values,
)

_PIECES = 8
"""A tile that costs more than such a part of a thread's share is cut along its cached rows: a long sequence with few
KV heads would leave threads without work."""
_PIECE_ROWS = 256
"""Cached rows of a piece, at least: below it costs more to put the pieces together."""


@helper
def _scratch_values(group: int, head_dim: int) -> Any:
    # Of tiles that cost more than a piece may there are fewer than `_PIECES` a thread, and rounding up their pieces
    # adds as many again at most.
    return work_values(group, head_dim) + 2 * _PIECES * piece_values(group, head_dim)


def scratch_values(group: int, head_dim: int) -> int:
    """float32 for each thread that `attend_all` works in."""
    return int(_scratch_values.py_func(group, head_dim))


@helper
def _cost(length: int, queries: int) -> int:
    """Of a tile, in what a query and a cached row cost; laying out a cached row is some 8 of it."""
    return (length + 16) * (queries + 8)


@helper
def _tile(row: int, num_rows: int, seq_len: int, group: int, window: int, most: int) -> Any:
    """Of the tile that begins at a row of its sequence's: its rows, the position of the first, the first cached row
    that it sees and the end of them, its cost, and how many cached rows each of its pieces has."""
    taken, position = min(tile_rows(group), num_rows - row), seq_len - num_rows + row
    first, end = first_seen(position, window), position + taken
    cost, length = _cost(end - first, taken * group), end - first
    pieces = max(np.int64(1), min((cost + most - 1) // most, length // _PIECE_ROWS))
    piece = length if pieces == 1 else ((length + pieces - 1) // pieces + SPAN - 1) // SPAN * SPAN
    return taken, position, first, end, cost, piece


@helper
def _attend_tiles(thread: int, threads: int, tag: Any, query: int, keys: int, values: int, table: int,
                  table_width: int, slots: int, starts: int, seq_lens: int, out: int, scratch: int, pieces: int,
                  whole: int, most: int, num_entries: int, heads: int, kv_heads: int, head_dim: int, block_size: int,
                  window: int, scale: float, softcap: float) -> None:  # fmt: skip
    """A thread's share of all entries' tiles, as near as their costs allow. `pieces`: where tiles that have several
    leave theirs. whole, most: costs, of all tiles and of a piece."""
    size, group = rows(tag, query, 1).itemsize, heads // kv_heads
    slot, lengths = rows(INT, slots, num_entries), rows(INT, seq_lens, num_entries)
    start = rows(INT, starts, num_entries + 1)
    scratch = (scratch + thread * work_values(group, head_dim) * 4 + 63) // 64 * 64
    cached_bytes, piece_bytes = kv_heads * head_dim * size, piece_values(group, head_dim) * 4
    done = np.int64(0)
    for entry in range(num_entries):
        num_rows: Any = np.int64(start[entry + 1] - start[entry])
        blocks = table + slot[entry] * table_width * 4
        row = np.int64(0)
        while row < num_rows:
            taken, position, first, end, cost, piece = _tile(
                row, num_rows, np.int64(lengths[entry]), group, window, most
            )
            # What comes after this tile: the sequence's next, which begins where this does, or the next one's.
            follows = entry if row + taken < num_rows else min(entry + 1, num_entries - 1)
            next_table = table + slot[follows] * table_width * 4
            next_first: Any = first_seen(lengths[follows] - (start[follows + 1] - start[follows]), window)
            next_end: Any = np.int64(lengths[follows])
            begin, length = first, end - first
            while begin < end:
                stop = min(begin + piece, end)
                share = cost * (stop - begin) // length
                if stop < end:
                    after_table, after_first, after_end = blocks, stop, end
                else:
                    after_table, after_first, after_end = next_table, next_first, next_end
                for kv_head in range(kv_heads):
                    # To whom its middle belongs.
                    if (2 * done + share) * threads // (2 * whole) == thread:
                        place = ((start[entry] + row) * heads + kv_head * group) * head_dim * size
                        head, last = kv_head * head_dim * size, kv_head + 1 == kv_heads
                        left = pieces + kv_head * piece_bytes if piece < length else 0
                        attend_piece(tag, query + place, keys + head, values + head, blocks, keys, after_table,
                                     after_first, min(SPAN, after_end - after_first) if last else 0,
                                     cached_bytes if kv_head == 0 else 0, out + place, left, scratch, taken, position,
                                     begin, stop, heads, kv_heads, head_dim, block_size, window, scale,
                                     softcap)  # fmt: skip
                    done += share
                if piece < length:
                    pieces += kv_heads * piece_bytes
                begin = stop
            row += taken


@helper
def _merge_tiles(thread: int, threads: int, tag: Any, starts: int, seq_lens: int, out: int, pieces: int, most: int,
                 num_entries: int, heads: int, kv_heads: int, head_dim: int, window: int) -> None:  # fmt: skip
    """A thread's share of the tiles that have several pieces."""
    size, group = rows(tag, out, 1).itemsize, heads // kv_heads
    lengths, start = rows(INT, seq_lens, num_entries), rows(INT, starts, num_entries + 1)
    piece_bytes, number = piece_values(group, head_dim) * 4, 0
    for entry in range(num_entries):
        num_rows: Any = np.int64(start[entry + 1] - start[entry])
        row = np.int64(0)
        while row < num_rows:
            taken, _, first, end, _, piece = _tile(row, num_rows, np.int64(lengths[entry]), group, window, most)
            if piece < end - first:
                num_pieces = (end - first + piece - 1) // piece
                for kv_head in range(kv_heads):
                    if number % threads == thread:
                        place = ((start[entry] + row) * heads + kv_head * group) * head_dim * size
                        merge_pieces(tag, pieces + kv_head * piece_bytes, num_pieces, kv_heads * piece_bytes,
                                     out + place, taken, heads, group, head_dim)  # fmt: skip
                    number += 1
                pieces += num_pieces * kv_heads * piece_bytes
            row += taken


@helper
def attend_all(tag: Any, team: int, query: int, keys: int, values: int, table: int, table_width: int, slots: int,
               starts: int, seq_lens: int, out: int, scratch: int, num_entries: int, heads: int, kv_heads: int,
               head_dim: int, block_size: int, window: int, scale: float, softcap: float) -> None:  # fmt: skip
    """Addresses. `scratch`: `scratch_values` for each thread of the team."""
    group, threads = heads // kv_heads, rows(LONG, team, 4)[3]
    lengths, start = rows(INT, seq_lens, num_entries), rows(INT, starts, num_entries + 1)
    whole, highest, longest = np.int64(0), np.int64(0), np.int64(0)
    for entry in range(num_entries):
        num_rows: Any = np.int64(start[entry + 1] - start[entry])
        row = np.int64(0)
        while row < num_rows:
            taken, _, first, end, cost, _ = _tile(row, num_rows, np.int64(lengths[entry]), group, window, 1)
            whole += cost * kv_heads
            highest, longest = max(highest, cost), max(longest, end - first)
            row += taken
    most = (whole + threads * _PIECES - 1) // (threads * _PIECES) if threads > 1 else whole
    pieces = scratch + threads * work_values(group, head_dim) * 4
    fork(team, _attend_tiles, (tag, query, keys, values, table, table_width, slots, starts, seq_lens, out, scratch,
                               pieces, whole, most, num_entries, heads, kv_heads, head_dim, block_size, window,
                               scale, softcap))  # fmt: skip
    if highest > most and longest >= 2 * _PIECE_ROWS:
        fork(team, _merge_tiles, (tag, starts, seq_lens, out, pieces, most, num_entries, heads, kv_heads, head_dim,
                                  window))  # fmt: skip


@long_kernel
def _attend(tag: Any, team: int, query: int, keys: int, values: int, table: int, table_width: int, slots: int,
            starts: int, seq_lens: int, out: int, scratch: int, num_entries: int, heads: int, kv_heads: int,
            head_dim: int, block_size: int, window: int, scale: float, softcap: float) -> None:  # fmt: skip
    attend_all(tag, team, query, keys, values, table, table_width, slots, starts, seq_lens, out, scratch, num_entries,
               heads, kv_heads, head_dim, block_size, window, scale, softcap)  # fmt: skip


_scratch = Scratch()
ATTENTION = Kernel(_attend, "i" * 17 + "ff")


def takes_head_size(dtype: torch.dtype, head_dim: int) -> bool:
    """bfloat16 is multiplied by pairs."""
    return dtype != torch.bfloat16 or head_dim % 2 == 0


def attend_cpu(query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch, out: Tensor, *,
               num_entries: int, scale: float, window: int | None, softcap: float | None) -> None:  # fmt: skip
    """Fills the rows of the batch's first entries in `out`; each sees its sequence up to itself.

    Args:
        query, out: [T, heads, head_dim], contiguous; see `takes_head_size`.
    """
    _, block_size, kv_heads, head_dim = key_cache.shape
    heads = query.shape[1]
    size = scratch_values(heads // kv_heads, head_dim)
    ATTENTION(
        query.dtype, team(), query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(),
        batch.block_table.data_ptr(), batch.block_table.shape[1], batch.entry_slots.data_ptr(),
        batch.entry_starts.data_ptr(), batch.seq_lens.data_ptr(), out.data_ptr(), _scratch.address(size), num_entries,
        heads, kv_heads, head_dim, block_size, window or 0, scale, softcap or 0.0,
    )  # fmt: skip


__all__ = ["ATTENTION", "attend_all", "attend_cpu", "scratch_values", "takes_head_size"]
