"""The Numba kernel behind `kernels.activation` on the CPU. Signatures and meaning are the reference's."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from runner.kernels._numba import Kernel, contiguous, exp, fork, helper, long_kernel, narrow, rows, team, wide
from runner.kernels.activation import Activation

_SHARED = 1 << 13
"""Values that are worth more than one thread."""


@helper
def _silu(x: Any) -> Any:
    return x / (np.float32(1) + exp(-x))


@helper
def _gelu_tanh(x: Any) -> Any:
    """x/2 (1 + tanh u) is x times the logistic function of 2u."""
    u = np.float32(0.7978845608028654) * (x + np.float32(0.044715) * x * x * x)
    return x / (np.float32(1) + exp(np.float32(-2) * u))


@helper
def _gate_rows(thread: int, threads: int, tag: Any, gate_up: int, out: int, num_rows: int, size: int,
               is_silu: int) -> None:  # fmt: skip
    sources, targets = rows(tag, gate_up, (num_rows, 2, size)), rows(tag, out, (num_rows, size))
    # Each thread takes some columns of every row, so that a single row is shared as well.
    first, end = size * thread // threads, size * (thread + 1) // threads
    for row in range(num_rows):
        gate, up, target = sources[row, 0][first:end], sources[row, 1][first:end], targets[row][first:end]
        if is_silu:
            for i in range(len(gate)):
                target[i] = narrow(tag, wide(narrow(tag, _silu(wide(gate[i])))) * wide(up[i]))
        else:
            for i in range(len(gate)):
                target[i] = narrow(tag, wide(narrow(tag, _gelu_tanh(wide(gate[i])))) * wide(up[i]))


@helper
def gate_all(tag: Any, team: int, gate_up: int, out: int, num_rows: int, size: int, is_silu: int) -> None:
    """Addresses of [num_rows, 2 * size] and [num_rows, size]."""
    args = (tag, gate_up, out, num_rows, size, is_silu)
    if num_rows * size < _SHARED:
        _gate_rows(0, 1, *args)
    else:
        fork(team, _gate_rows, args)


@long_kernel
def _gated(tag: Any, team: int, gate_up: int, out: int, num_rows: int, size: int, is_silu: int) -> None:
    gate_all(tag, team, gate_up, out, num_rows, size, is_silu)


GATED = Kernel(_gated, "iiiiii")


def gated_cpu(gate_up: Tensor, activation: Activation) -> Tensor:
    gate_up = contiguous(gate_up)
    num_rows, width = gate_up.shape
    out = gate_up.new_empty(num_rows, width // 2)
    GATED(gate_up.dtype, team(), gate_up.data_ptr(), out.data_ptr(), num_rows, width // 2, activation == "silu")
    return out
