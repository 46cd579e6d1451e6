"""Paged attention on the GPU: a split-KV kernel for decodes and a flash-style kernel for everything else.

Chosen by `runner.trial` where there is a CUDA device. Nothing here looks at device data from the host: the launches
depend on the batch's static sizes alone, so a step is captured once and replayed with any schedule that fits it.

What a captured step may leave open: in a decode step (num_decodes == num_entries) entries without rows are padding. In
a mixed step the kernels look at each entry themselves: among the first `num_decodes`, those of one row are decodes. A
graph for mixed steps therefore takes num_entries as large as it may get and num_decodes = num_entries - 1. Rows past
the step's own are written as zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runner.attention.backend import AttentionBatch
from runner.kernels._triton import dependent_launch, tl, triton

_LOG2_E = tl.constexpr(1.4426950408889634)
_LONG_SPLIT = 4096
"""Rows of KV that one program walks through at most, as long as _MAX_LONG_SPLITS programs suffice."""
_MAX_LONG_SPLITS = 16
_MAX_SPLITS = 64
_FEW_SPLITS = 4
_UNSPLIT_PROGRAMS = 256
"""From so many on nothing is split: they fill an H200's 132 multiprocessors, and no second launch has to merge them."""
_TARGET_PROGRAMS = 512


@dataclass(frozen=True)
class Tiles:
    """How a kernel is cut: query rows times heads, KV rows, and the compiler's warps and pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


class TritonAttention:
    """`AttentionBackend` for CUDA. Tiles are chosen by head size and dtype; give them to measure others."""

    capturable = True
    short_seq_len = _LONG_SPLIT

    def __init__(self, decode_tiles: Tiles | None = None, prefill_tiles: Tiles | None = None) -> None:
        self._decode_tiles = decode_tiles
        self._prefill_tiles = prefill_tiles

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch, *, scale: float,
               window: int | None, softcap: float | None) -> Tensor:  # fmt: skip
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        common = (query, key_cache, value_cache, batch, out, scale, window, softcap)
        pure = batch.num_decodes == batch.num_entries
        if not pure:
            self._attend_prompts(*common)
        if pure or batch.num_decodes:
            _decode(*common, self._decode_tiles or _decode_tiles(query), pure)
        return out

    def _attend_prompts(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch, out: Tensor,
                        scale: float, window: int | None, softcap: float | None) -> None:  # fmt: skip
        """Every row but those of decodes, and zeros for padding."""
        group = query.shape[1] // key_cache.shape[2]
        tiles = self._prefill_tiles or _prefill_tiles(query, group, batch.num_entries)
        _prefill(query, key_cache, value_cache, batch, out, scale, window, softcap, tiles)


def _decode_tiles(query: Tensor) -> Tiles:
    # Some 64 KiB of keys and values in flight, and room for two or three programs on a multiprocessor.
    if query.dtype == torch.float32:
        return Tiles(16, 16, num_warps=4, num_stages=2)
    return Tiles(16, 32, num_warps=4, num_stages=3) if query.shape[2] > 128 else Tiles(16, 64, num_warps=4, num_stages=2)


def _prefill_tiles(query: Tensor, group: int, num_entries: int) -> Tiles:
    if query.dtype == torch.float32:
        return Tiles(16, 16, num_warps=4, num_stages=1)  # no tensor cores: larger ones spill registers
    rows, _, head_dim = query.shape
    # A chunk of few rows would leave most of a tall tile empty.
    block_m = 64 if rows * group <= 64 * num_entries else 128
    if head_dim > 128:
        return Tiles(block_m, 32, num_warps=8, num_stages=2)
    return Tiles(block_m, 64, num_warps=8 if block_m == 128 else 4, num_stages=3)


@triton.jit  # type: ignore[untyped-decorator]
def _attend_tiles(  # type: ignore[no-untyped-def]
    total, row_max, row_sum, query, position, last,
    keys, values, block_stride, row_stride, table,
    tile_from, tile_to, visible_from, visible_to, scale, window, softcap,
    MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over the KV rows [tile_from, tile_to) of one sequence and one KV head.

    total [M, D], row_max [M], row_sum [M]: the running state, fp32, maxima in base-2 units. MASKED: each score is
    checked against its row's position and the last one that the row sees (`last`); rows of the cache outside
    [visible_from, visible_to) are then not read at all, since what lies there may be anything (a NaN would survive a
    weight of zero).
    """
    dim = tl.arange(0, BLOCK_D)
    lane = tl.arange(0, BLOCK_N)
    # Blocks are looked up one tile ahead: an address that waits for a load would cost the pipeline a stage.
    ahead = tile_from + lane
    next_block = tl.load(table + ahead // PAGE, mask=(ahead >= visible_from) & (ahead < tile_to), other=0)
    for tile in range(tile_from, tile_to, BLOCK_N):
        seen = tile + lane
        block = next_block
        ahead = seen + BLOCK_N
        next_block = tl.load(table + ahead // PAGE, mask=ahead < tile_to, other=0)
        offsets = (block.to(tl.int64) * block_stride + (seen % PAGE) * row_stride)[:, None] + dim[None, :]
        if MASKED:
            inside = (seen >= visible_from) & (seen < visible_to)
            mask = inside[:, None] & (dim < HEAD_DIM)[None, :]
            key = tl.load(keys + offsets, mask=mask, other=0.0)
            value = tl.load(values + offsets, mask=mask, other=0.0)
        elif HEAD_DIM != BLOCK_D:
            mask = (dim < HEAD_DIM)[None, :]
            key = tl.load(keys + offsets, mask=mask, other=0.0)
            value = tl.load(values + offsets, mask=mask, other=0.0)
        else:
            key = tl.load(keys + offsets)
            value = tl.load(values + offsets)

        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        if HAS_SOFTCAP:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1), right at both infinities of the exponential.
            growth = tl.exp2(scores * (scale / softcap * 2 * _LOG2_E))
            scores = softcap * _LOG2_E * (1 - 2 / (growth + 1))
        else:
            scores = scores * (scale * _LOG2_E)
        if MASKED:
            visible = inside[None, :] & (seen[None, :] <= last[:, None])
            if HAS_WINDOW:
                visible = visible & (seen[None, :] > position[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # A row that has seen nothing yet: -inf - -inf would be NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(row_max - shift)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        total = tl.dot(weights.to(value.dtype), value, total * decay[:, None], input_precision=PRECISION)
        row_max = new_max
    return total, row_max, row_sum


@triton.jit  # type: ignore[untyped-decorator]
def _split(  # type: ignore[no-untyped-def]
    seq_len, window, fill, max_splits, HAS_WINDOW: tl.constexpr, LONG: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """How a decode's KV rows are split: the first row, the rows of a split, the number of splits in use.

    `fill` splits keep the device busy; more, up to `max_splits`, are used only to keep each below LONG rows.
    """
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(seq_len - window, 0) // BLOCK_N * BLOCK_N
    span = seq_len - first
    size = tl.maximum(tl.minimum(tl.cdiv(span, fill), LONG), tl.cdiv(span, max_splits))
    size = tl.maximum(tl.cdiv(size, BLOCK_N), 1) * BLOCK_N
    return first, size, tl.cdiv(span, size)


@triton.jit(do_not_specialize=["num_decodes", "window", "fill", "max_splits"])  # type: ignore[untyped-decorator]
def _decode_kernel(  # type: ignore[no-untyped-def]
    query, query_row_stride, query_head_stride, query_dim_stride,
    key_cache, value_cache, block_stride, row_stride, head_stride,
    block_table, block_table_stride, entry_slots, entry_starts, seq_lens,
    out, partial_total, partial_max, partial_sum,
    scale, window, softcap, num_decodes, fill, max_splits,
    PURE: tl.constexpr, LONG: tl.constexpr, GROUP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (h, i, s): entry i's one row, the query heads of KV head h, KV split s."""
    # Where everything is, is known since the step's first kernel: only keys, values and queries are waited for.
    head, entry, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq_len = tl.load(seq_lens + entry, mask=entry < num_decodes, other=0)
    slot = tl.load(entry_slots + entry, mask=entry < num_decodes, other=0).to(tl.int64)
    row, rows = entry, 1
    if not PURE:
        row = tl.load(entry_starts + entry)
        rows = tl.load(entry_starts + entry + 1) - row
    first, size, splits = _split(seq_len, window, fill, max_splits, HAS_WINDOW, LONG, BLOCK_N)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if (rows != 1) | (split >= tl.maximum(splits, 1)):
        return

    m = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    query_head = head * GROUP + m
    here = (m < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    q_row = query + row.to(tl.int64) * query_row_stride
    q = tl.load(q_row + query_head[:, None] * query_head_stride + dim[None, :] * query_dim_stride, mask=here, other=0.0)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    position = tl.zeros([BLOCK_M], tl.int32) + (seq_len - 1)
    tile_from = first + split * size
    tile_to = tl.minimum(tile_from + size, seq_len)
    visible_from = 0
    if HAS_WINDOW:
        visible_from = seq_len - window
    total, row_max, row_sum = _attend_tiles(
        total, row_max, row_sum, q, position, position,
        key_cache + head * head_stride, value_cache + head * head_stride, block_stride, row_stride,
        block_table + slot * block_table_stride,
        tile_from, tile_to, visible_from, tile_to, scale, window, softcap,
        True, HAS_WINDOW, HAS_SOFTCAP, HEAD_DIM, PAGE, BLOCK_N, BLOCK_D, PRECISION,
    )  # fmt: skip

    heads = tl.num_programs(0) * GROUP
    if splits > 1:
        index = (entry * heads + query_head) * max_splits + split
        tl.store(partial_max + index, row_max, mask=m < GROUP)
        tl.store(partial_sum + index, row_sum, mask=m < GROUP)
        tl.store(partial_total + index.to(tl.int64)[:, None] * HEAD_DIM + dim[None, :], total, mask=here)
    else:
        # A row of padding has seen nothing: 0 / 1.
        result = total / tl.where(row_sum == 0, 1.0, row_sum)[:, None]
        target = row.to(tl.int64) * heads + query_head
        tl.store(out + target[:, None] * HEAD_DIM + dim[None, :], result.to(out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["num_decodes", "window", "fill", "max_splits"])  # type: ignore[untyped-decorator]
def _reduce_kernel(  # type: ignore[no-untyped-def]
    partial_total, partial_max, partial_sum, entry_starts, seq_lens, out, window, num_decodes, fill, max_splits,
    PURE: tl.constexpr, LONG: tl.constexpr, HAS_WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (h, i) merges what `_decode_kernel` left of query head h of entry i."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    head, entry = tl.program_id(0), tl.program_id(1)
    seq_len = tl.load(seq_lens + entry, mask=entry < num_decodes, other=0)
    row = entry
    if not PURE:
        row = tl.load(entry_starts + entry)
        if tl.load(entry_starts + entry + 1) - row != 1:
            return
    _, _, splits = _split(seq_len, window, fill, max_splits, HAS_WINDOW, LONG, BLOCK_N)
    if splits <= 1:
        return  # the row was written at once
    split = tl.arange(0, BLOCK_S)
    dim = tl.arange(0, BLOCK_D)
    used = split < splits
    index = (entry * tl.num_programs(0) + head) * max_splits + split
    maxima = tl.load(partial_max + index, mask=used, other=float("-inf"))
    weights = tl.exp2(maxima - tl.max(maxima, 0))
    sums = tl.load(partial_sum + index, mask=used, other=0.0)
    here = used[:, None] & (dim < HEAD_DIM)[None, :]
    totals = tl.load(partial_total + index.to(tl.int64)[:, None] * HEAD_DIM + dim[None, :], mask=here, other=0.0)
    result = tl.sum(totals * weights[:, None], 0) / tl.sum(sums * weights, 0)
    target = out + (row.to(tl.int64) * tl.num_programs(0) + head) * HEAD_DIM + dim
    tl.store(target, result.to(out.dtype.element_ty), mask=dim < HEAD_DIM)


def _decode(query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch, out: Tensor, scale: float,
            window: int | None, softcap: float | None, tiles: Tiles, pure: bool) -> None:  # fmt: skip
    """Entries of one row. Pure: they are all of the step, row i is entry i, and the rows left over are padding."""
    num_rows, heads, head_dim = query.shape
    kv_heads = key_cache.shape[2]
    group = heads // kv_heads
    entries = num_rows if pure else batch.num_decodes
    if entries == 0:
        return
    fill, splits = _num_splits(entries * kv_heads, batch.max_seq_len, tiles.block_n)
    # Filled and read within this call; in a captured step they belong to the graph's own memory.
    shape = (entries, heads, splits) if splits > 1 else (0,)
    partial_total = torch.empty(*shape, head_dim, dtype=torch.float32, device=query.device)
    partial_max = torch.empty(shape, dtype=torch.float32, device=query.device)
    partial_sum = torch.empty(shape, dtype=torch.float32, device=query.device)
    # Constants of the model alone: what changes from step to step must not compile a kernel anew.
    common = {
        "PURE": pure, "LONG": _LONG_SPLIT, "HAS_WINDOW": window is not None, "HEAD_DIM": head_dim,
        "BLOCK_N": tiles.block_n, "BLOCK_D": _power_of_2(head_dim), **dependent_launch(query),
    }  # fmt: skip
    _decode_kernel[(kv_heads, entries, splits)](
        query, *query.stride(), key_cache, value_cache, *key_cache.stride()[:3],
        batch.block_table, batch.block_table.stride(0), batch.entry_slots, batch.entry_starts, batch.seq_lens,
        out, partial_total, partial_max, partial_sum, float(scale), window or 0, softcap or 0.0,
        batch.num_decodes, fill, splits,
        GROUP=group, HAS_SOFTCAP=softcap is not None, PAGE=key_cache.shape[1],
        BLOCK_M=max(tiles.block_m, _power_of_2(group)), PRECISION=_precision(query),
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, **common,
    )  # fmt: skip
    if splits > 1:
        _reduce_kernel[(heads, entries)](
            partial_total, partial_max, partial_sum, batch.entry_starts, batch.seq_lens, out, window or 0,
            batch.num_decodes, fill, splits, BLOCK_S=_FEW_SPLITS if splits <= _FEW_SPLITS else _MAX_SPLITS, **common,
        )  # fmt: skip


def _num_splits(programs: int, max_seq_len: int, block_n: int) -> tuple[int, int]:
    """(fill, max_splits) of `_split`, for so many programs before splitting."""
    fill = 1 if programs >= _UNSPLIT_PROGRAMS else 1 << ((_TARGET_PROGRAMS // programs).bit_length() - 1)
    fill = min(fill, _MAX_SPLITS, _power_of_2(-(-max_seq_len // block_n)))
    return fill, max(fill, min(_MAX_LONG_SPLITS, _power_of_2(-(-max_seq_len // _LONG_SPLIT))))


def _power_of_2(x: int) -> int:
    """The smallest that is at least x."""
    return 1 << max(x - 1, 0).bit_length()


def _precision(query: Tensor) -> str:
    """fp32 means fp32: no TF32."""
    return "ieee" if query.dtype == torch.float32 else "tf32"


@triton.jit(do_not_specialize=["num_rows", "num_entries", "num_decodes", "window"])  # type: ignore[untyped-decorator]
def _prefill_kernel(  # type: ignore[no-untyped-def]
    query, query_row_stride, query_head_stride, query_dim_stride,
    key_cache, value_cache, block_stride, row_stride, head_stride,
    block_table, block_table_stride, entry_slots, entry_starts, positions, attend_until,
    out, scale, window, softcap, num_rows, num_entries, num_decodes,
    GROUP: tl.constexpr, TWO_WAY: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (t, h): a tile of BLOCK_M // GROUP rows of one entry, with all query heads of KV head h.

    Entry i's tiles are those from entry_starts[i] // BLOCK_Q + i on: never fewer than it needs, and found without a
    list of tiles. The rows past the last entry count as one entry more, and are set to zero.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    # Later tiles see more rows: they go first, so that none of them is left over at the end.
    tile_id = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    # The last entry whose tiles begin at or before this one; all are compared at once, since most tiles are nobody's.
    entry = tl.arange(0, BLOCK_E)
    first_tile = tl.load(entry_starts + entry, mask=entry <= num_entries, other=0) // BLOCK_Q + entry
    low = tl.sum(((entry <= num_entries) & (first_tile <= tile_id)).to(tl.int32), 0) - 1
    start = tl.load(entry_starts + low)
    padding = low == num_entries
    end = tl.where(padding, num_rows, tl.load(entry_starts + low + 1, mask=low < num_entries, other=0))
    first_row = start + (tile_id - start // BLOCK_Q - low) * BLOCK_Q
    if first_row >= end:
        return
    if (end - start == 1) & (low < num_decodes):
        return  # the decode kernel's

    m = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    row = first_row + m // GROUP
    query_head = head * GROUP + m % GROUP
    here = ((m < BLOCK_Q * GROUP) & (row < end))[:, None] & (dim < HEAD_DIM)[None, :]
    heads = tl.num_programs(1) * GROUP
    target = out + (row.to(tl.int64) * heads + query_head)[:, None] * HEAD_DIM + dim[None, :]
    if padding:
        tl.store(target, tl.zeros([BLOCK_M, BLOCK_D], out.dtype.element_ty), mask=here)
        return

    offsets = row.to(tl.int64) * query_row_stride + query_head * query_head_stride
    q = tl.load(query + offsets[:, None] + dim[None, :] * query_dim_stride, mask=here, other=0.0)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    first_position = tl.load(positions + first_row).to(tl.int32)
    last_position = first_position + tl.minimum(BLOCK_Q, end - first_row) - 1
    position = first_position + m // GROUP
    last = position
    visible_to = last_position + 1
    if TWO_WAY:
        last = tl.load(attend_until + row, mask=row < end, other=0) - 1
        visible_to = tl.max(last, 0) + 1
    slot = tl.load(entry_slots + low).to(tl.int64)
    table = block_table + slot * block_table_stride
    keys, values = key_cache + head * head_stride, value_cache + head * head_stride

    # [tile_from, full_from): before some row's window; [full_from, full_to): seen by every row; then the diagonal.
    visible_from = 0
    tile_from = 0
    full_from = 0
    full_to = (first_position + 1) // BLOCK_N * BLOCK_N
    if HAS_WINDOW:
        visible_from = tl.maximum(first_position - window + 1, 0)
        tile_from = visible_from // BLOCK_N * BLOCK_N
        full_from = tl.cdiv(tl.maximum(last_position - window + 1, 0), BLOCK_N) * BLOCK_N
        total, row_max, row_sum = _attend_tiles(
            total, row_max, row_sum, q, position, last, keys, values, block_stride, row_stride, table,
            tile_from, tl.minimum(full_from, visible_to), visible_from, visible_to,
            scale, window, softcap,
            True, HAS_WINDOW, HAS_SOFTCAP, HEAD_DIM, PAGE, BLOCK_N, BLOCK_D, PRECISION,
        )  # fmt: skip
        full_to = tl.maximum(full_from, full_to)
    total, row_max, row_sum = _attend_tiles(
        total, row_max, row_sum, q, position, last, keys, values, block_stride, row_stride, table,
        full_from, full_to, visible_from, visible_to, scale, window, softcap,
        False, HAS_WINDOW, HAS_SOFTCAP, HEAD_DIM, PAGE, BLOCK_N, BLOCK_D, PRECISION,
    )  # fmt: skip
    total, row_max, row_sum = _attend_tiles(
        total, row_max, row_sum, q, position, last, keys, values, block_stride, row_stride, table,
        full_to, visible_to, visible_from, visible_to, scale, window, softcap,
        True, HAS_WINDOW, HAS_SOFTCAP, HEAD_DIM, PAGE, BLOCK_N, BLOCK_D, PRECISION,
    )  # fmt: skip
    # Rows of the tile that aren't the entry's may have seen nothing; they are not stored.
    result = total / tl.where(row_sum == 0, 1.0, row_sum)[:, None]
    tl.store(target, result.to(out.dtype.element_ty), mask=here)


def _prefill(query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch, out: Tensor, scale: float,
             window: int | None, softcap: float | None, tiles: Tiles) -> None:  # fmt: skip
    """Every row but those of decodes; zeros for padding."""
    num_rows, heads, head_dim = query.shape
    kv_heads = key_cache.shape[2]
    group = heads // kv_heads
    block_m = max(tiles.block_m, _power_of_2(group))
    max_tiles = (num_rows - 1) // (block_m // group) + batch.num_entries + 1
    _prefill_kernel[(max_tiles, kv_heads)](
        query, *query.stride(), key_cache, value_cache, *key_cache.stride()[:3],
        batch.block_table, batch.block_table.stride(0), batch.entry_slots, batch.entry_starts, batch.positions,
        batch.positions if batch.attend_until is None else batch.attend_until,
        out, float(scale), window or 0, softcap or 0.0, num_rows, batch.num_entries, batch.num_decodes,
        GROUP=group, TWO_WAY=batch.attend_until is not None, HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None, HEAD_DIM=head_dim, PAGE=key_cache.shape[1],
        BLOCK_M=block_m, BLOCK_N=tiles.block_n, BLOCK_D=_power_of_2(head_dim),
        PRECISION=_precision(query), BLOCK_E=_power_of_2(len(batch.entry_starts)),
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, **dependent_launch(query),
    )  # fmt: skip
