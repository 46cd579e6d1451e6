"""Linear layers in bfloat16 for a step of few rows, over weights as oneDNN packs them.

Called by `runner.packed_linear`. With few rows a layer takes as long as its weights take to be read, and oneDNN takes
half as long again. Packed, 64 outputs lie side by side: [outputs / 64, inputs / 2, 64, 2], the inputs padded with zeros
to a multiple of 32. A tile is 64 outputs of up to `TILE_ROWS` rows, whose sums stay in registers, in float32, while the
weights pass by.
"""

from __future__ import annotations

import ctypes
from typing import Any

import llvmlite.binding
import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor
from torch.nn.functional import pad

from runner.kernels._numba import BFLOAT, FLOAT, Kernel, Scratch, fork, helper, long_kernel, narrow, rows, team, wide

TILE_ROWS = 6
_TILE_COLUMNS = 64
_LANES = 16
_VECTORS = _TILE_COLUMNS // _LANES
_BLOCK_COLUMNS, _BLOCK_INPUTS = 64, 32

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_WORDS, _FLOATS = ir.VectorType(_I32, _LANES), ir.VectorType(ir.FloatType(), _LANES)
_BFLOATS = ir.VectorType(BFLOAT, 2 * _LANES)


def has_dot_product() -> bool:
    """Whether this machine multiplies and adds pairs of bfloat16 in one instruction."""
    if numba.config.CPU_FEATURES is not None:
        return "+avx512bf16" in numba.config.CPU_FEATURES.split(",")
    return bool(llvmlite.binding.get_host_cpu_features().get("avx512bf16"))


class _TileCode:
    """Writes the loop over a tile's weights for a number of rows."""

    def __init__(self, builder: Any, num_rows: int) -> None:
        self._builder, self._num_rows, self._fused = builder, num_rows, has_dot_product()
        self._sums = [cgutils.alloca_once(builder, _FLOATS) for _ in range(num_rows * _VECTORS)]

    def write(self, weights: Any, x: Any, x_stride: Any, pairs: Any, out: Any) -> None:
        builder = self._builder
        for place in self._sums:
            builder.store(ir.Constant(_FLOATS, [0.0] * _LANES), place)
        with cgutils.for_range(builder, pairs) as loop:
            base = self._plus(weights, builder.mul(loop.index, ir.Constant(_I64, _BLOCK_COLUMNS * 4)))
            loaded = [self._load(self._plus(base, v * 64), _WORDS, 64) for v in range(_VECTORS)]
            offset = builder.mul(loop.index, ir.Constant(_I64, 4))
            for row in range(self._num_rows):
                place = self._plus(self._plus(x, builder.mul(x_stride, ir.Constant(_I64, row))), offset)
                self._add(row, loaded, self._load(place, _I32, 2))
        for n, place in enumerate(self._sums):
            target = builder.inttoptr(self._plus(out, n * 64), _FLOATS.as_pointer())
            builder.store(builder.load(place), target, align=4)

    def _add(self, row: int, weights: list[Any], pair: Any) -> None:
        """To the row's sums: its next two inputs, times their weights."""
        builder = self._builder
        both = builder.insert_element(ir.Constant(_WORDS, ir.Undefined), pair, ir.Constant(_I32, 0))
        both = builder.shuffle_vector(both, ir.Constant(_WORDS, ir.Undefined), ir.Constant(_WORDS, [0] * _LANES))
        for n, weight in enumerate(weights):
            place = self._sums[row * _VECTORS + n]
            total = builder.load(place)
            if self._fused:
                operands = [total, builder.bitcast(weight, _BFLOATS), builder.bitcast(both, _BFLOATS)]
                total = self._call("llvm.x86.avx512bf16.dpbf16ps.512", operands)
            else:
                for half in (self._even, self._odd):
                    total = self._call("llvm.fma.v16f32", [half(weight), half(both), total])
            builder.store(total, place)

    def _even(self, words: Any) -> Any:
        return self._builder.bitcast(self._builder.shl(words, ir.Constant(_WORDS, [16] * _LANES)), _FLOATS)

    def _odd(self, words: Any) -> Any:
        return self._builder.bitcast(self._builder.and_(words, ir.Constant(_WORDS, [0xFFFF0000] * _LANES)), _FLOATS)

    def _call(self, name: str, operands: list[Any]) -> Any:
        kind = ir.FunctionType(_FLOATS, [operand.type for operand in operands])
        return self._builder.call(cgutils.get_or_insert_function(self._builder.module, kind, name), operands)

    def _plus(self, address: Any, offset: Any) -> Any:
        return self._builder.add(address, ir.Constant(_I64, offset) if isinstance(offset, int) else offset)

    def _load(self, address: Any, kind: Any, align: int) -> Any:
        return self._builder.load(self._builder.inttoptr(address, kind.as_pointer()), align=align)


@intrinsic
def _multiply(typingctx: Any, num_rows: Any, weights: Any, x: Any, x_stride: Any, pairs: Any, out: Any) -> Any:
    """out: [num_rows, 64] float32. weights, x, out: addresses; x_stride: bytes from row to row."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        after = builder.append_basic_block("after")
        switch = builder.switch(args[0], after)
        for count in range(1, TILE_ROWS + 1):
            block = builder.append_basic_block(f"rows_{count}")
            switch.add_case(ir.Constant(_I64, count), block)
            builder.position_at_end(block)
            _TileCode(builder, count).write(*args[1:])
            builder.branch(after)
        builder.position_at_end(after)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 6), generate


@helper
def _multiply_columns(thread: int, threads: int, tag: Any, x: int, x_stride: int, weights: int, bias: int, out: int,
                      out_stride: int, scratch: int, num_rows: int, inputs: int, outputs: int) -> None:  # fmt: skip
    """A thread's share of the outputs, of all rows. The strides are in bytes."""
    scratch += thread * TILE_ROWS * _TILE_COLUMNS * 4
    sums = rows(FLOAT, scratch, (TILE_ROWS, _TILE_COLUMNS))
    block_bytes = (inputs + _BLOCK_INPUTS - 1) // _BLOCK_INPUTS * _BLOCK_INPUTS * _BLOCK_COLUMNS * 2
    tiles = (num_rows + TILE_ROWS - 1) // TILE_ROWS
    units = (outputs + _TILE_COLUMNS - 1) // _TILE_COLUMNS
    for unit in range(units * thread // threads, units * (thread + 1) // threads):
        column = unit * _TILE_COLUMNS
        columns = min(_TILE_COLUMNS, outputs - column)
        place = weights + unit * block_bytes
        for tile in range(tiles):
            first, end = num_rows * tile // tiles, num_rows * (tile + 1) // tiles
            _multiply(end - first, place, x + first * x_stride, x_stride, inputs // 2, scratch)
            for row in range(end - first):
                target = rows(tag, out + (first + row) * out_stride + column * 2, columns)
                source = sums[row]
                if bias:
                    added = rows(tag, bias + column * 2, columns)
                    for i in range(columns):
                        target[i] = narrow(tag, source[i] + wide(added[i]))
                else:
                    for i in range(columns):
                        target[i] = narrow(tag, source[i])


@long_kernel
def _linear(tag: Any, team: int, x: int, x_stride: int, weights: int, bias: int, out: int, out_stride: int,
            scratch: int, num_rows: int, inputs: int, outputs: int) -> None:  # fmt: skip
    fork(team, _multiply_columns, (tag, x, x_stride, weights, bias, out, out_stride, scratch, num_rows, inputs,
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
    PACKED_LINEAR(
        torch.bfloat16, team(), x.data_ptr(), x.stride(0) * 2, packed, 0 if bias is None else bias.data_ptr(),
        out.data_ptr(), out.stride(0) * 2, _scratch.address(TILE_ROWS * _TILE_COLUMNS), num_rows, inputs, outputs,
    )  # fmt: skip
    return out


def is_known_layout(weight: Tensor, packed: int, num_bytes: int) -> bool:
    """Whether these bytes are `weight` ([outputs, inputs] bfloat16) as this file expects it: oneDNN chooses its layout
    by machine and version."""
    outputs, inputs = weight.shape
    across, down = -(-outputs // _BLOCK_COLUMNS), -(-inputs // _BLOCK_INPUTS)
    if inputs % 2 or packed % 64 or num_bytes != across * down * _BLOCK_COLUMNS * _BLOCK_INPUTS * 2:
        return False
    block = down * _BLOCK_COLUMNS * _BLOCK_INPUTS
    for which in {0, across - 1}:  # looking at all would double the time that packing takes
        part = weight[which * _BLOCK_COLUMNS : (which + 1) * _BLOCK_COLUMNS]
        padded = pad(part, (0, down * _BLOCK_INPUTS - inputs, 0, _BLOCK_COLUMNS - len(part)))
        expected = padded.view(_BLOCK_COLUMNS, -1, 2).transpose(0, 1).contiguous().view(torch.int16).numpy()
        memory = (ctypes.c_int16 * block).from_address(packed + which * block * 2)
        if not np.array_equal(np.ctypeslib.as_array(memory), expected.reshape(-1)):
            return False
    return True
