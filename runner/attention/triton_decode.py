"""Decodes on the GPU: split-KV attention (Flash-Decoding) of one row a sequence.

Called by `triton_attention`. A program walks through one KV head's keys of one sequence, or a split of them; a second
launch merges splits where there are any.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runner.attention.backend import AttentionBatch
from runner.attention.triton_tiles import Tiles, attend_tiles, first_blocks, power_of_2, precision
from runner.kernels._triton import dependent_launch, tl, triton

LONG_SPLIT = 4096
"""Rows of KV that one program walks through at most, as long as _MAX_LONG_SPLITS programs suffice."""
_MAX_LONG_SPLITS = 16
_MAX_SPLITS = 64
_FEW_SPLITS = 4
_UNSPLIT_PROGRAMS = 256
"""From so many on nothing is split: they fill an H200's 132 multiprocessors, and no second launch has to merge them."""
_TARGET_PROGRAMS = 512
_FEW_PROGRAMS, _MANY_PROGRAMS = 64, 1024
"""Between these, where a KV head has one or two query heads, shorter tiles are faster by 1 to 8 % (measured)."""


def decode_tiles(query: Tensor, kv_heads: int, entries: int) -> Tiles:
    """Some 64 KiB of keys and values in flight, and room for three or four programs on a multiprocessor."""
    heads, head_dim = query.shape[1:]
    if query.dtype == torch.float32:
        return Tiles(16, 16, num_warps=4, num_stages=2)
    short = heads <= 2 * kv_heads and _FEW_PROGRAMS <= entries * kv_heads < _MANY_PROGRAMS
    if head_dim > 128 or short:
        return Tiles(16, 32, num_warps=4, num_stages=3)
    return Tiles(16, 64, num_warps=4, num_stages=2)


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
    tile_from = first + split * size
    tile_to = tl.minimum(tile_from + size, seq_len)
    visible_from = 0
    if HAS_WINDOW:
        visible_from = seq_len - window
    table = block_table + slot * block_table_stride
    keys, values = key_cache + head * head_stride, value_cache + head * head_stride
    next_block = first_blocks(table, tile_from, tile_to, visible_from, PAGE, BLOCK_N)
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
    total, row_max, row_sum = attend_tiles(
        total, row_max, row_sum, q, position, position, keys, values, block_stride, row_stride, table, next_block,
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


def attend_decodes(query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch, out: Tensor,
                   scale: float, window: int | None, softcap: float | None, tiles: Tiles,
                   pure: bool) -> None:  # fmt: skip
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
        "PURE": pure, "LONG": LONG_SPLIT, "HAS_WINDOW": window is not None, "HEAD_DIM": head_dim,
        "BLOCK_N": tiles.block_n, "BLOCK_D": power_of_2(head_dim), **dependent_launch(query),
    }  # fmt: skip
    _decode_kernel[(kv_heads, entries, splits)](
        query, *query.stride(), key_cache, value_cache, *key_cache.stride()[:3],
        batch.block_table, batch.block_table.stride(0), batch.entry_slots, batch.entry_starts, batch.seq_lens,
        out, partial_total, partial_max, partial_sum, float(scale), window or 0, softcap or 0.0,
        batch.num_decodes, fill, splits,
        GROUP=group, HAS_SOFTCAP=softcap is not None, PAGE=key_cache.shape[1],
        BLOCK_M=max(tiles.block_m, power_of_2(group)), PRECISION=precision(query),
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
    fill = min(fill, _MAX_SPLITS, power_of_2(-(-max_seq_len // block_n)))
    return fill, max(fill, min(_MAX_LONG_SPLITS, power_of_2(-(-max_seq_len // LONG_SPLIT))))
