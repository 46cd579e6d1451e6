"""The greedy choice on the CPU: the place of each row's highest value, of equal ones the lowest.

Called by `kernels.gumbel`. torch's `argmax` takes several times as long, and wants a copy in float32 first. Values are
compared by their bits as whole numbers in the same order, which is vectorised. A NaN is above all, as torch has it:
what a mask has set to minus infinity isn't chosen where all else is NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from runner.kernels._numba import LONG, Kernel, contiguous, fork, helper, long_kernel, rows, team

_PIECE = 512
"""Values of which the highest is found before their places are looked at."""


@intrinsic
def _order(typingctx: Any, tag: Any, value: Any) -> Any:
    """A stored value as a whole number of as many bits, in the same order; both zeros are 0, NaN is the largest."""
    number = types.int32 if tag == types.float32 else types.int16
    infinity = {types.float32: 0x7F800000, types.uint16: 0x7F80, types.int16: 0x7C00}[tag]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = context.get_value_type(number)
        bits = builder.bitcast(args[1], kind)
        largest = kind((1 << (number.bitwidth - 1)) - 1)
        magnitude = builder.and_(bits, largest)
        negative = builder.icmp_signed("<", bits, kind(0))
        order = builder.select(negative, builder.neg(magnitude), magnitude)
        return builder.select(builder.icmp_signed(">", magnitude, kind(infinity)), largest, order)

    return number(tag, value), generate


@helper
def _best(tag: Any, values: Any) -> int:
    best, found = _order(tag, values[0]), 0
    for first in range(0, len(values), _PIECE):
        piece = values[first : first + _PIECE]
        top = _order(tag, piece[0])
        for i in range(len(piece)):
            top = max(top, _order(tag, piece[i]))
        if top > best:
            best, found = top, first
    for i in range(found, len(values)):
        if _order(tag, values[i]) == best:
            return i
    return 0


@helper
def _best_of_rows(thread: int, threads: int, tag: Any, values: int, out: int, num_rows: int, size: int) -> None:
    found, row_bytes = rows(LONG, out, num_rows), size * rows(tag, values, 1).itemsize
    for row in range(num_rows * thread // threads, num_rows * (thread + 1) // threads):
        found[row] = _best(tag, rows(tag, values + row * row_bytes, size))


@long_kernel
def _argmax(tag: Any, team: int, values: int, out: int, num_rows: int, size: int) -> None:
    fork(team, _best_of_rows, (tag, values, out, num_rows, size))


ARGMAX = Kernel(_argmax, "iiiii")


def argmax_cpu(values: Tensor) -> Tensor:
    """[N, vocab] to [N] int64."""
    values = contiguous(values)
    out = values.new_empty(len(values), dtype=torch.int64)
    ARGMAX(values.dtype, team(), values.data_ptr(), out.data_ptr(), len(values), values.shape[1])
    return out
