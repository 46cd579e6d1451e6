"""Linear layers in bfloat16 over weights as oneDNN packs them.

Called by `runner.packed_linear` and, as one part of a whole forward, by `decoder_cpu`. Packed, 64 outputs lie side by
side: [outputs / 64, inputs / 2, 64, 2], the inputs padded with zeros to a multiple of 32. A tile is 64 outputs of a few
rows (`tile_cpu`). Where there is more than one tile below a block of weights, the inputs are taken in parts, so that a
part's weights stay in the first cache while all rows pass by, and the next part's are asked for meanwhile.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from runner.kernels._numba import FLOAT, Kernel, Scratch, fork, helper, long_kernel, narrow, prefetch, rows, team, wide
from runner.kernels.tile_cpu import (
    LINES_AHEAD,
    STEP_BYTES,
    TILE_COLUMNS,
    TILE_ROWS,
    has_dot_product,
    has_feature,
    tile_product_ahead,
)

_BLOCK_INPUTS = 32
_PART_INPUTS = 128
"""Of which the weights take 16 KiB of a first cache's 32 or 48."""
_MANY_TILES = 16
"""From so many on each asks for its share of the next part's weights at its start; before, the first two do in their
loops, lest the requests be too many at a time."""


@helper
def multiply_columns(thread: int, threads: int, tag: Any, x: int, x_stride: int, weights: int, bias: int, out: int,
                     out_stride: int, scratch: int, num_rows: int, inputs: int, outputs: int) -> None:  # fmt: skip
    """A thread's share: tiles in a row, those of the same outputs one after another. The strides are in bytes.
    `scratch`: `scratch_values(num_rows)` for each thread."""
    scratch += thread * scratch_values(num_rows) * 4
    block_bytes = (inputs + _BLOCK_INPUTS - 1) // _BLOCK_INPUTS * _BLOCK_INPUTS * TILE_COLUMNS * 2
    tiles = (num_rows + TILE_ROWS - 1) // TILE_ROWS
    units = (outputs + TILE_COLUMNS - 1) // TILE_COLUMNS
    # Of few rows each thread has outputs of its own: their weights are what takes time.
    grain = 2 if tiles == 2 else 1
    share = units * tiles // grain
    first, end = share * thread // threads * grain, share * (thread + 1) // threads * grain
    while first < end:
        unit = first // tiles
        begin, stop = first - unit * tiles, min(tiles, end - unit * tiles)
        column = unit * TILE_COLUMNS
        _multiply_unit(tag, x, x_stride, weights + unit * block_bytes, bias + column * 2 if bias else 0,
                       out + column * 2, out_stride, scratch, num_rows, inputs, min(TILE_COLUMNS, outputs - column),
                       tiles, begin, stop)  # fmt: skip
        first = unit * tiles + stop


@helper
def scratch_values(num_rows: int) -> int:
    """float32 that a thread of `multiply_columns` works in."""
    return (num_rows + TILE_ROWS) * TILE_COLUMNS


@helper
def _multiply_unit(tag: Any, x: int, x_stride: int, weights: int, bias: int, out: int, out_stride: int, scratch: int,
                   num_rows: int, inputs: int, columns: int, tiles: int, begin: int, stop: int) -> None:  # fmt: skip
    """64 outputs (or the last few) of the rows in tiles `begin` to `stop`."""
    steps = inputs // 2
    parts = (inputs + _PART_INPUTS - 1) // _PART_INPUTS if stop - begin > 1 else 1
    direct = not bias and columns == TILE_COLUMNS
    for part in range(parts):
        step, next_step = steps * part // parts, steps * (part + 1) // parts
        following, size = weights + next_step * STEP_BYTES, (next_step - step) * STEP_BYTES
        final = direct and part == parts - 1
        for tile in range(begin, stop):
            row, end_row = num_rows * tile // tiles, num_rows * (tile + 1) // tiles
            ahead, done = 0, tile - begin
            if stop - begin >= _MANY_TILES:
                asked = size * done // (stop - begin) // 64 * 64
                prefetch(following + asked, size * (done + 1) // (stop - begin) // 64 * 64 - asked)
            elif stop - begin > 1 and done < 4 // LINES_AHEAD:
                ahead = following + done * (next_step - step) * 64 * LINES_AHEAD
            tile_product_ahead(
                tag, end_row - row, weights + step * STEP_BYTES, x + row * x_stride + step * 4, x_stride,
                next_step - step, scratch + row * TILE_COLUMNS * 4, TILE_COLUMNS * 4, part,
                out + row * out_stride if final else 0, out_stride, ahead,
            )  # fmt: skip
    if not direct:
        for row in range(num_rows * begin // tiles, num_rows * stop // tiles):
            target, source = (
                rows(tag, out + row * out_stride, columns),
                rows(FLOAT, scratch, (num_rows, TILE_COLUMNS))[row],
            )
            if bias:
                added = rows(tag, bias, columns)
                for i in range(columns):
                    target[i] = narrow(tag, source[i] + wide(added[i]))
            else:
                for i in range(columns):
                    target[i] = narrow(tag, source[i])


@long_kernel
def _linear(tag: Any, team: int, x: int, x_stride: int, weights: int, bias: int, out: int, out_stride: int,
            scratch: int, num_rows: int, inputs: int, outputs: int) -> None:  # fmt: skip
    fork(team, multiply_columns, (tag, x, x_stride, weights, bias, out, out_stride, scratch, num_rows, inputs,
                                  outputs))  # fmt: skip


_scratch = Scratch()
PACKED_LINEAR = Kernel(_linear, "i" * 11)


def packed_linear_cpu(x: Tensor, packed: int, bias: Tensor | None, outputs: int, out: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, rounded once.

    Args:
        x: [T, inputs] bfloat16, contiguous, an even number of inputs.
        packed: address of the weight, for which `is_known_layout`.
        bias: [outputs].
        out: [T, outputs], contiguous rows.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    num_rows, inputs = x.shape
    if out is None:
        out = x.new_empty(num_rows, outputs)
    scratch = _scratch.address((num_rows + TILE_ROWS) * TILE_COLUMNS)
    PACKED_LINEAR(
        torch.bfloat16, team(), x.data_ptr(), x.stride(0) * 2, packed, 0 if bias is None else bias.data_ptr(),
        out.data_ptr(), out.stride(0) * 2, scratch, num_rows, inputs, outputs,
    )  # fmt: skip
    return out


def is_fastest() -> bool:
    """Whether the product of any number of rows is computed here. Without dot products of bfloat16 oneDNN is as fast
    from some 12 rows on, and much faster where there are units for matrices."""
    return has_dot_product() and not has_feature("amx-bf16")


def is_known_layout(weight: Tensor, packed: int, num_bytes: int) -> bool:
    """Whether these bytes are `weight` ([outputs, inputs] bfloat16) as this file expects it: oneDNN chooses its layout
    by machine and version."""
    outputs, inputs = weight.shape
    across, down = -(-outputs // TILE_COLUMNS), -(-inputs // _BLOCK_INPUTS)
    if inputs % 2 or packed % 64 or num_bytes != across * down * TILE_COLUMNS * _BLOCK_INPUTS * 2:
        return False
    block = down * TILE_COLUMNS * _BLOCK_INPUTS
    for which in {0, across - 1}:  # looking at all would double the time that packing takes
        part = weight[which * TILE_COLUMNS : (which + 1) * TILE_COLUMNS]
        padded = pad(part, (0, down * _BLOCK_INPUTS - inputs, 0, TILE_COLUMNS - len(part)))
        expected = padded.view(TILE_COLUMNS, -1, 2).transpose(0, 1).contiguous().view(torch.int16).numpy()
        memory = (ctypes.c_int16 * block).from_address(packed + which * block * 2)
        if not np.array_equal(np.ctypeslib.as_array(memory), expected.reshape(-1)):
            return False
    return True


__all__ = [
    "PACKED_LINEAR", "has_dot_product", "is_fastest", "is_known_layout", "multiply_columns", "packed_linear_cpu",
    "scratch_values",
]  # fmt: skip
