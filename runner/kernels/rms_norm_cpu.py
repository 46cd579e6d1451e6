"""The Numba kernel behind `kernels.rms_norm` on the CPU. Signatures and meaning are the reference's."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.kernels._numba import Kernel, contiguous, fork, helper, kernel, narrow, rows, team, wide

_SHARED = 1 << 14
"""Values that are worth more than one thread."""


@helper
def norm_row(tag: Any, x: Any, weight: Any, out: Any, eps: Any, unit_offset: int) -> None:
    """One row. All [n]; `out` may be `x`."""
    total = np.float32(0)
    for i in range(len(x)):
        total += wide(x[i]) * wide(x[i])
    factor = np.float32(1) / np.sqrt(total / np.float32(len(x)) + np.float32(eps))
    if unit_offset:
        for i in range(len(x)):
            out[i] = narrow(tag, wide(x[i]) * factor * (np.float32(1) + wide(weight[i])))
    else:
        for i in range(len(x)):
            out[i] = narrow(tag, wide(weight[i]) * wide(narrow(tag, wide(x[i]) * factor)))


@helper
def norm_rows(thread: int, threads: int, tag: Any, x: int, stride: int, residual: int, weight: int, out: int,
               total: int, num_rows: int, hidden: int, eps: float, unit_offset: int) -> None:  # fmt: skip
    """Row by row. `residual`, `total`: 0, or where to read what is added and to write the sum."""
    size = rows(tag, x, 1).itemsize
    weights = rows(tag, weight, hidden)
    for row in range(num_rows * thread // threads, num_rows * (thread + 1) // threads):
        source, place = rows(tag, x + row * stride * size, hidden), row * hidden * size
        if residual:
            added, summed = rows(tag, residual + place, hidden), rows(tag, total + place, hidden)
            for i in range(hidden):
                summed[i] = narrow(tag, wide(source[i]) + wide(added[i]))
            source = summed
        norm_row(tag, source, weights, rows(tag, out + place, hidden), eps, unit_offset)


@helper
def norm_all(tag: Any, team: int, x: int, stride: int, residual: int, weight: int, out: int, total: int, num_rows: int,
             hidden: int, eps: float, unit_offset: int) -> None:  # fmt: skip
    """Addresses; `stride` in values."""
    args = (tag, x, stride, residual, weight, out, total, num_rows, hidden, eps, unit_offset)
    if num_rows * hidden < _SHARED:
        norm_rows(0, 1, *args)
    else:
        fork(team, norm_rows, args)


@kernel
def _rms_norm(tag: Any, team: int, x: int, stride: int, residual: int, weight: int, out: int, total: int,
              num_rows: int, hidden: int, eps: float, unit_offset: int) -> None:  # fmt: skip
    norm_all(tag, team, x, stride, residual, weight, out, total, num_rows, hidden, eps, unit_offset)


RMS_NORM = Kernel(_rms_norm, "iiiiiiiiifi")


def rms_norm_cpu(x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    num_rows, hidden = x.shape
    RMS_NORM(
        x.dtype, team(), x.data_ptr(), x.stride(0), 0, weight.data_ptr(), out.data_ptr(), 0, num_rows, hidden, eps,
        unit_offset,
    )  # fmt: skip
    return out


def add_rms_norm_cpu(x: Tensor, residual: Tensor, weight: Tensor, eps: float,
                     unit_offset: bool = False) -> tuple[Tensor, Tensor]:  # fmt: skip
    if x.stride(1) != 1:
        x = x.contiguous()
    residual = contiguous(residual)
    out, total = torch.empty_like(residual), torch.empty_like(residual)
    num_rows, hidden = x.shape
    RMS_NORM(
        x.dtype, team(), x.data_ptr(), x.stride(0), residual.data_ptr(), weight.data_ptr(), out.data_ptr(),
        total.data_ptr(), num_rows, hidden, eps, unit_offset,
    )  # fmt: skip
    return out, total
