"""The Numba kernel behind `kernels.rope` on the CPU. Signatures and meaning are the reference's, and what is rounded
there is rounded here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from runner.kernels._numba import LONG, Kernel, Scratch, fork, helper, kernel, narrow, rows, team, wide
from runner.kernels.rms_norm_cpu import norm_row

if TYPE_CHECKING:
    from runner.kernels.rope import HeadNorm, RopeTable

_SHARED = 1 << 13
"""Values that are worth more than one thread."""
_LARGEST = np.finfo(np.float32).max


@helper
def _rounded(tag: Any, value: Any) -> Any:
    return wide(narrow(tag, value))


@helper
def _rotate(tag: Any, source: Any, cos: Any, sin: Any, target: Any) -> None:
    """One head. source, target: [head_dim]; cos, sin: [rotary_dim], whose halves are alike."""
    half = len(cos) // 2
    for i in range(half):
        first, second = wide(source[i]), wide(source[half + i])
        target[i] = narrow(tag, _rounded(tag, first * wide(cos[i])) - _rounded(tag, second * wide(sin[i])))
        target[half + i] = narrow(
            tag, _rounded(tag, second * wide(cos[half + i])) + _rounded(tag, first * wide(sin[half + i]))
        )
    for i in range(len(cos), len(source)):
        target[i] = source[i]


@helper
def _finite(tag: Any, value: Any) -> Any:
    """As `cache_write.only_finite`."""
    return value if abs(wide(value)) <= _LARGEST else narrow(tag, np.float32(0))


@helper
def _rope_rows(thread: int, threads: int, tag: Any, query: int, query_row: int, query_head: int, key: int, key_row: int,
               key_head: int, value: int, value_row: int, value_head: int, cos: int, sin: int, rotary_dim: int,
               positions: int, key_cache: int, value_cache: int, index: int, out: int, query_weight: int,
               key_weight: int, scratch: int, num_rows: int, heads: int, kv_heads: int, head_dim: int, eps: float,
               unit_offset: int) -> None:  # fmt: skip
    size = rows(tag, out, 1).itemsize
    where, places = rows(LONG, positions, num_rows), rows(LONG, index, num_rows)
    normed = rows(tag, scratch + thread * head_dim * 4, head_dim)
    for row in range(num_rows * thread // threads, num_rows * (thread + 1) // threads):
        cosines = rows(tag, cos + where[row] * rotary_dim * size, rotary_dim)
        sines = rows(tag, sin + where[row] * rotary_dim * size, rotary_dim)
        for head in range(heads):
            source = rows(tag, query + (row * query_row + head * query_head) * size, head_dim)
            if query_weight:
                norm_row(tag, source, rows(tag, query_weight, head_dim), normed, eps, unit_offset)
                source = normed
            _rotate(tag, source, cosines, sines, rows(tag, out + (row * heads + head) * head_dim * size, head_dim))
        for head in range(kv_heads):
            source = rows(tag, key + (row * key_row + head * key_head) * size, head_dim)
            if key_weight:
                norm_row(tag, source, rows(tag, key_weight, head_dim), normed, eps, unit_offset)
                source = normed
            place = (places[row] * kv_heads + head) * head_dim * size
            target = rows(tag, key_cache + place, head_dim)
            _rotate(tag, source, cosines, sines, target)
            for i in range(head_dim):
                target[i] = _finite(tag, target[i])
            source = rows(tag, value + (row * value_row + head * value_head) * size, head_dim)
            target = rows(tag, value_cache + place, head_dim)
            for i in range(head_dim):
                target[i] = _finite(tag, source[i])


@helper
def rope_all(tag: Any, team: int, query: int, query_row: int, query_head: int, key: int, key_row: int, key_head: int,
             value: int, value_row: int, value_head: int, cos: int, sin: int, rotary_dim: int, positions: int,
             key_cache: int, value_cache: int, index: int, out: int, query_weight: int, key_weight: int, scratch: int,
             num_rows: int, heads: int, kv_heads: int, head_dim: int, eps: float,
             unit_offset: int) -> None:  # fmt: skip
    """Addresses; strides in values. `scratch`: head_dim float32 for each thread."""
    args = (tag, query, query_row, query_head, key, key_row, key_head, value, value_row, value_head, cos, sin,
            rotary_dim, positions, key_cache, value_cache, index, out, query_weight, key_weight, scratch, num_rows,
            heads, kv_heads, head_dim, eps, unit_offset)  # fmt: skip
    if num_rows * heads * head_dim < _SHARED:
        _rope_rows(0, 1, *args)
    else:
        fork(team, _rope_rows, args)


@kernel
def _rope_and_write(tag: Any, team: int, query: int, query_row: int, query_head: int, key: int, key_row: int,
                    key_head: int, value: int, value_row: int, value_head: int, cos: int, sin: int, rotary_dim: int,
                    positions: int, key_cache: int, value_cache: int, index: int, out: int, query_weight: int,
                    key_weight: int, scratch: int, num_rows: int, heads: int, kv_heads: int, head_dim: int, eps: float,
                    unit_offset: int) -> None:  # fmt: skip
    rope_all(tag, team, query, query_row, query_head, key, key_row, key_head, value, value_row, value_head, cos, sin,
             rotary_dim, positions, key_cache, value_cache, index, out, query_weight, key_weight, scratch, num_rows,
             heads, kv_heads, head_dim, eps, unit_offset)  # fmt: skip


_scratch = Scratch()
ROPE = Kernel(_rope_and_write, "i" * 25 + "fi")


def rope_and_write_cpu(query: Tensor, key: Tensor, value: Tensor, table: RopeTable, positions: Tensor,
                       key_cache: Tensor, value_cache: Tensor, cache_index: Tensor,
                       norm: HeadNorm | None = None) -> Tensor:  # fmt: skip
    num_rows, heads, head_dim = query.shape
    out = query.new_empty(num_rows, heads, head_dim)
    weights = (0, 0) if norm is None else (norm.query_weight.data_ptr(), norm.key_weight.data_ptr())
    strided = [number for x in (query, key, value) for number in (x.data_ptr(), x.stride(0), x.stride(1))]
    ROPE(
        query.dtype, team(), *strided, table.cos.data_ptr(), table.sin.data_ptr(), table.cos.shape[1],
        positions.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), cache_index.data_ptr(), out.data_ptr(),
        *weights, _scratch.address(head_dim), num_rows, heads, key.shape[1], head_dim,
        0.0 if norm is None else norm.eps, norm is not None and norm.unit_offset,
    )  # fmt: skip
    return out
