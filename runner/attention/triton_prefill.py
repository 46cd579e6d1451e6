"""Prompts on the GPU: flash-style attention of many rows a sequence.

Called by `triton_attention` for whatever isn't a decode.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runner.attention.backend import AttentionBatch
from runner.attention.triton_tiles import Tiles, attend_tiles, first_blocks, power_of_2, precision
from runner.kernels._triton import dependent_launch, tl, triton


def prefill_tiles(query: Tensor, group: int, num_entries: int) -> Tiles:
    if query.dtype == torch.float32:
        return Tiles(16, 16, num_warps=4, num_stages=1)  # no tensor cores: larger ones spill registers
    rows, _, head_dim = query.shape
    # A chunk of few rows would leave most of a tall tile empty.
    block_m = 64 if rows * group <= 64 * num_entries else 128
    if head_dim > 128:
        return Tiles(block_m, 32, num_warps=8, num_stages=2)
    return Tiles(block_m, 64, num_warps=8 if block_m == 128 else 4, num_stages=3)


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
        total, row_max, row_sum = attend_tiles(
            total, row_max, row_sum, q, position, last, keys, values, block_stride, row_stride, table,
            first_blocks(table, tile_from, tl.minimum(full_from, visible_to), visible_from, PAGE, BLOCK_N),
            tile_from, tl.minimum(full_from, visible_to), visible_from, visible_to,
            scale, window, softcap,
            True, HAS_WINDOW, HAS_SOFTCAP, HEAD_DIM, PAGE, BLOCK_N, BLOCK_D, PRECISION,
        )  # fmt: skip
        full_to = tl.maximum(full_from, full_to)
    total, row_max, row_sum = attend_tiles(
        total, row_max, row_sum, q, position, last, keys, values, block_stride, row_stride, table,
        first_blocks(table, full_from, full_to, visible_from, PAGE, BLOCK_N),
        full_from, full_to, visible_from, visible_to, scale, window, softcap,
        False, HAS_WINDOW, HAS_SOFTCAP, HEAD_DIM, PAGE, BLOCK_N, BLOCK_D, PRECISION,
    )  # fmt: skip
    total, row_max, row_sum = attend_tiles(
        total, row_max, row_sum, q, position, last, keys, values, block_stride, row_stride, table,
        first_blocks(table, full_to, visible_to, visible_from, PAGE, BLOCK_N),
        full_to, visible_to, visible_from, visible_to, scale, window, softcap,
        True, HAS_WINDOW, HAS_SOFTCAP, HEAD_DIM, PAGE, BLOCK_N, BLOCK_D, PRECISION,
    )  # fmt: skip
    # Rows of the tile that aren't the entry's may have seen nothing; they are not stored.
    result = total / tl.where(row_sum == 0, 1.0, row_sum)[:, None]
    tl.store(target, result.to(out.dtype.element_ty), mask=here)


def attend_prompts(query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch, out: Tensor,
                   scale: float, window: int | None, softcap: float | None, tiles: Tiles) -> None:  # fmt: skip
    """Every row but those of decodes; zeros for padding."""
    num_rows, heads, head_dim = query.shape
    kv_heads = key_cache.shape[2]
    group = heads // kv_heads
    block_m = max(tiles.block_m, power_of_2(group))
    max_tiles = (num_rows - 1) // (block_m // group) + batch.num_entries + 1
    _prefill_kernel[(max_tiles, kv_heads)](
        query, *query.stride(), key_cache, value_cache, *key_cache.stride()[:3],
        batch.block_table, batch.block_table.stride(0), batch.entry_slots, batch.entry_starts, batch.positions,
        batch.positions if batch.attend_until is None else batch.attend_until,
        out, float(scale), window or 0, softcap or 0.0, num_rows, batch.num_entries, batch.num_decodes,
        GROUP=group, TWO_WAY=batch.attend_until is not None, HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None, HEAD_DIM=head_dim, PAGE=key_cache.shape[1],
        BLOCK_M=block_m, BLOCK_N=tiles.block_n, BLOCK_D=power_of_2(head_dim),
        PRECISION=precision(query), BLOCK_E=power_of_2(len(batch.entry_starts)),
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, **dependent_launch(query),
    )  # fmt: skip
