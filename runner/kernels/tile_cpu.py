"""The product that linear layers and attention share on the CPU: a few rows times 64 columns, sums in registers.

Called by `packed_linear_cpu` and `attention_cpu`. What is multiplied by is laid out so that a step of the loop reads
256 bytes in a row: bfloat16 as pairs of inputs, [inputs / 2, 64, 2] (which is how oneDNN packs weights, too), float32
as [inputs, 64]. Written in LLVM's own terms: a loop in Python, compiled, keeps none of the sums in registers.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic

from runner.kernels._numba import BFLOAT

TILE_ROWS = 6
TILE_COLUMNS = 64
STEP_BYTES = 256
"""Of one step, all columns."""
LINES_AHEAD = 2
"""Cache lines that a step asks for where `tile_product_ahead` is told to: half of what it reads itself."""
_LANES = 16
_VECTORS = TILE_COLUMNS // _LANES

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_WORDS, _FLOATS = ir.VectorType(_I32, _LANES), ir.VectorType(ir.FloatType(), _LANES)
_BFLOATS, _HALF_WORDS = ir.VectorType(BFLOAT, 2 * _LANES), ir.VectorType(ir.IntType(16), _LANES)
_BYTES = ir.IntType(8).as_pointer()


def has_feature(name: str) -> bool:
    """Of the machine that is compiled for, as Numba tells LLVM of it: an instruction that it lacks ends the process."""
    configured = numba.config.CPU_FEATURES
    return f"+{name}" in (get_host_cpu_features() if configured is None else configured).split(",")


def has_dot_product() -> bool:
    """Whether this machine multiplies and adds pairs of bfloat16 in one instruction."""
    return has_feature("avx512bf16")


class _Code:
    """Writes instructions on addresses and vectors of 16."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def number(self, value: int) -> Any:
        return ir.Constant(_I64, value)

    def plus(self, address: Any, offset: Any) -> Any:
        return self.builder.add(address, self.number(offset) if isinstance(offset, int) else offset)

    def times(self, value: Any, factor: int) -> Any:
        return self.builder.mul(value, self.number(factor))

    def load(self, address: Any, kind: Any, align: int) -> Any:
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=align)

    def store(self, value: Any, address: Any, align: int) -> None:
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer()), align=align)

    def call(self, name: str, result: Any, *operands: Any) -> Any:
        kind = ir.FunctionType(result, [operand.type for operand in operands])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), operands)

    def shuffled(self, a: Any, b: Any, lanes: list[int]) -> Any:
        return self.builder.shuffle_vector(a, b, ir.Constant(_WORDS, lanes))

    def prefetch(self, address: Any) -> None:
        """Into the second level: the first holds what is at work."""
        read, locality, data = (ir.Constant(_I32, number) for number in (0, 2, 1))
        self.call("llvm.prefetch.p0i8", ir.VoidType(), self.builder.inttoptr(address, _BYTES), read, locality, data)


class _TileCode(_Code):
    """Writes the loop over a tile's inputs for a number of rows."""

    def __init__(self, builder: Any, num_rows: int, paired: bool) -> None:
        super().__init__(builder)
        self._num_rows, self._paired, self._dots = num_rows, paired, has_dot_product()
        self._sums = [cgutils.alloca_once(builder, _FLOATS) for _ in range(num_rows * _VECTORS)]

    def write(self, ahead: Any, columns: Any, x: Any, x_stride: Any, steps: Any, sums: Any, sums_stride: Any,
              more: Any, out: Any, out_stride: Any) -> None:  # fmt: skip
        """`ahead`: None, or what to ask the memory for meanwhile."""
        builder = self.builder
        with builder.if_else(more) as (then, otherwise):
            with then:
                for row, v, place in self._places():
                    builder.store(self.load(self._at(sums, sums_stride, row, v * 64), _FLOATS, 4), place)
            with otherwise:
                for _, _, place in self._places():
                    builder.store(ir.Constant(_FLOATS, [0.0] * _LANES), place)
        with cgutils.for_range(builder, steps) as loop:
            base = self.plus(columns, self.times(loop.index, STEP_BYTES))
            loaded = [self.load(self.plus(base, v * 64), _WORDS, 4) for v in range(_VECTORS)]
            if ahead is not None:
                for line in range(LINES_AHEAD):
                    self.prefetch(self.plus(ahead, self.plus(self.times(loop.index, 64 * LINES_AHEAD), 64 * line)))
            for row in range(self._num_rows):
                word = self.load(self.plus(self._at(x, x_stride, row, 0), self.times(loop.index, 4)), _I32, 2)
                self._add(row, loaded, word)
        with builder.if_else(builder.icmp_signed("!=", out, self.number(0))) as (then, otherwise):
            with then:
                for row, v, place in self._places():
                    self.store(self._narrowed(builder.load(place)), self._at(out, out_stride, row, v * 32), 2)
            with otherwise:
                for row, v, place in self._places():
                    self.store(builder.load(place), self._at(sums, sums_stride, row, v * 64), 4)

    def _places(self) -> list[tuple[int, int, Any]]:
        return [(n // _VECTORS, n % _VECTORS, place) for n, place in enumerate(self._sums)]

    def _at(self, address: Any, stride: Any, row: int, offset: int) -> Any:
        return self.plus(self.plus(address, self.times(stride, row)), offset)

    def _add(self, row: int, columns: list[Any], word: Any) -> None:
        """To the row's sums: its next input, or two, times the columns."""
        builder = self.builder
        one = builder.insert_element(ir.Constant(_WORDS, ir.Undefined), word, ir.Constant(_I32, 0))
        all_lanes = self.shuffled(one, ir.Constant(_WORDS, ir.Undefined), [0] * _LANES)
        for n, column in enumerate(columns):
            place = self._sums[row * _VECTORS + n]
            total = builder.load(place)
            if self._paired and self._dots:
                pairs = [builder.bitcast(words, _BFLOATS) for words in (column, all_lanes)]
                total = self.call("llvm.x86.avx512bf16.dpbf16ps.512", _FLOATS, total, *pairs)
            else:
                for part in (self._low, self._high) if self._paired else (self._whole,):
                    total = self.call("llvm.fma.v16f32", _FLOATS, part(column), part(all_lanes), total)
            builder.store(total, place)

    def _low(self, words: Any) -> Any:
        return self.builder.bitcast(self.builder.shl(words, ir.Constant(_WORDS, [16] * _LANES)), _FLOATS)

    def _high(self, words: Any) -> Any:
        return self.builder.bitcast(self.builder.and_(words, ir.Constant(_WORDS, [0xFFFF0000] * _LANES)), _FLOATS)

    def _whole(self, words: Any) -> Any:
        return self.builder.bitcast(words, _FLOATS)

    def _narrowed(self, values: Any) -> Any:
        """float32 to bfloat16, to nearest even."""
        builder = self.builder
        if self._dots:
            return self.call("llvm.x86.avx512bf16.cvtneps2bf16.512", ir.VectorType(BFLOAT, _LANES), values)
        bits = builder.bitcast(values, _WORDS)
        high = builder.lshr(bits, ir.Constant(_WORDS, [16] * _LANES))
        odd = builder.and_(high, ir.Constant(_WORDS, [1] * _LANES))
        half = builder.add(ir.Constant(_WORDS, [0x7FFF] * _LANES), odd)
        rounded = builder.lshr(builder.add(bits, half), ir.Constant(_WORDS, [16] * _LANES))
        quiet = builder.or_(high, ir.Constant(_WORDS, [0x40] * _LANES))
        chosen = builder.select(builder.fcmp_unordered("uno", values, values), quiet, rounded)
        return builder.trunc(chosen, _HALF_WORDS)


def _generate(paired: bool, looks: bool) -> Any:
    """A switch over the number of rows, and over whether there is anything to look ahead for."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, count, *rest = args
        ahead = rest.pop() if looks else None
        zero = ir.Constant(_I64, 0)
        rest[6] = builder.icmp_signed("!=", rest[6], zero)
        index = builder.add(count, count)
        if looks:
            index = builder.add(index, builder.zext(builder.icmp_signed("!=", ahead, zero), _I64))
        after = builder.append_basic_block("after")
        switch = builder.switch(index, after)
        for rows in range(1, TILE_ROWS + 1):
            for looking in (0, 1) if looks else (0,):
                block = builder.append_basic_block(f"rows_{rows}_{looking}")
                switch.add_case(ir.Constant(_I64, 2 * rows + looking), block)
                builder.position_at_end(block)
                _TileCode(builder, rows, paired).write(ahead if looking else None, *rest)
                builder.branch(after)
        builder.position_at_end(after)
        return context.get_dummy_value()

    return generate


@intrinsic
def tile_product(typingctx: Any, tag: Any, num_rows: Any, columns: Any, x: Any, x_stride: Any, steps: Any, sums: Any,
                 sums_stride: Any, more: Any, out: Any, out_stride: Any) -> Any:  # fmt: skip
    """Up to `TILE_ROWS` rows times 64 columns. Addresses, and strides in bytes from row to row.

    Args:
        tag: uint16 for bfloat16, or float32.
        columns: [steps, 64 words of four bytes]; x: rows of `steps` such words, at least.
        sums: [num_rows, 64] float32. Read where `more` isn't 0; written unless `out` is given.
        out: [num_rows, 64] bfloat16; 0: none.
    """
    return types.void(tag, *(types.int64,) * 10), _generate(tag == types.uint16, False)


@intrinsic
def tile_product_ahead(typingctx: Any, tag: Any, num_rows: Any, columns: Any, x: Any, x_stride: Any, steps: Any,
                       sums: Any, sums_stride: Any, more: Any, out: Any, out_stride: Any,
                       ahead: Any) -> Any:  # fmt: skip
    """The same, which meanwhile asks for memory that will be read soon.

    Args:
        ahead: where that begins, `LINES_AHEAD` lines for each step; 0: none.
    """
    return types.void(tag, *(types.int64,) * 11), _generate(tag == types.uint16, True)


@intrinsic
def transpose_words(typingctx: Any, base: Any, places: Any, words: Any, out: Any) -> Any:
    """16 rows' words of four bytes side by side: `out` [words, 64] gets 16 of its columns.

    Args:
        base: address that the places count from; places: address of 16 int64, where each row begins, in bytes.
        words: of a row, at least 16.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        base, places, words, out = args
        code = _Code(builder)
        rows = [code.plus(base, code.load(code.plus(places, 8 * lane), _I64, 8)) for lane in range(_LANES)]
        groups = builder.sdiv(builder.add(words, code.number(_LANES - 1)), code.number(_LANES))
        last = builder.sub(words, code.number(_LANES))
        with cgutils.for_range(builder, groups) as loop:
            first = code.times(loop.index, _LANES)
            # The last group overlaps the one before it where the words don't fill it.
            first = builder.select(builder.icmp_signed(">", first, last), last, first)
            vectors = [code.load(code.plus(row, code.times(first, 4)), _WORDS, 2) for row in rows]
            for lane, vector in enumerate(_transposed(code, vectors)):
                code.store(vector, code.plus(out, code.times(code.plus(first, lane), STEP_BYTES)), 4)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 4), generate


def _transposed(code: _Code, vectors: list[Any]) -> list[Any]:
    """16 vectors of 16: in each pass squares off the diagonal, of 8, 4, 2 and 1, change places."""
    for size in (8, 4, 2, 1):
        for i in range(_LANES):
            if not i & size:
                a, b = vectors[i], vectors[i + size]
                low = [lane if not lane & size else _LANES + lane - size for lane in range(_LANES)]
                high = [lane + size if not lane & size else _LANES + lane for lane in range(_LANES)]
                vectors[i], vectors[i + size] = code.shuffled(a, b, low), code.shuffled(a, b, high)
    return vectors


__all__ = [
    "LINES_AHEAD", "STEP_BYTES", "TILE_COLUMNS", "TILE_ROWS", "has_dot_product", "has_feature", "tile_product",
    "tile_product_ahead", "transpose_words",
]  # fmt: skip
