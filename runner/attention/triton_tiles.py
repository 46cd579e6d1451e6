"""What the Triton kernels of attention share: how they are cut into tiles, and the online softmax over tiles of keys.

Used by `triton_decode` and `triton_prefill`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runner.kernels._triton import tl, triton

LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class Tiles:
    """How a kernel is cut: query rows times heads, KV rows, and the compiler's warps and pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def power_of_2(x: int) -> int:
    """The smallest that is at least x."""
    return 1 << max(x - 1, 0).bit_length()


def precision(query: Tensor) -> str:
    """fp32 means fp32: no TF32."""
    return "ieee" if query.dtype == torch.float32 else "tf32"


@triton.jit  # type: ignore[untyped-decorator]
def first_blocks(  # type: ignore[no-untyped-def]
    table, tile_from, tile_to, visible_from, PAGE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The blocks of a first tile's rows, [N]; 0 for rows that aren't read."""
    row = tile_from + tl.arange(0, BLOCK_N)
    return tl.load(table + row // PAGE, mask=(row >= visible_from) & (row < tile_to), other=0)


@triton.jit  # type: ignore[untyped-decorator]
def attend_tiles(  # type: ignore[no-untyped-def]
    total, row_max, row_sum, query, position, last,
    keys, values, block_stride, row_stride, table, next_block,
    tile_from, tile_to, visible_from, visible_to, scale, window, softcap,
    MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over the KV rows [tile_from, tile_to) of one sequence and one KV head.

    total [M, D], row_max [M], row_sum [M]: the running state, fp32, maxima in base-2 units. next_block:
    `first_blocks` of the first tile. MASKED: each score is checked against its row's position and the last one that the
    row sees (`last`); rows of the cache outside [visible_from, visible_to) are then not read at all, since what lies
    there may be anything (a NaN would survive a weight of zero).
    """
    dim = tl.arange(0, BLOCK_D)
    lane = tl.arange(0, BLOCK_N)
    # Blocks are looked up one tile ahead: an address that waits for a load would cost the pipeline a stage.
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
            growth = tl.exp2(scores * (scale / softcap * 2 * LOG2_E))
            scores = softcap * LOG2_E * (1 - 2 / (growth + 1))
        else:
            scores = scores * (scale * LOG2_E)
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
