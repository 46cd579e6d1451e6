"""All layers of a Llama-like decoder in one call on the CPU, in bfloat16.

Called by `runner.decoder` where every linear layer is one that our own kernel computes. What it computes is what
`DecoderLayer` does, by the same functions as the kernels that this calls one by one; only Python and torch between them
are left out, whose time one thread takes while the others wait. Memory between the parts is kept from call to call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from runner.attention.backend import AttentionBatch
from runner.attention.cpu_attention import CpuAttention
from runner.kernels import attention_cpu, packed_linear_cpu
from runner.kernels._numba import LONG, Kernel, Scratch, fork, helper, long_kernel, rows, team
from runner.kernels.activation_cpu import gate_all
from runner.kernels.attention_cpu import attend_all
from runner.kernels.packed_linear_cpu import multiply_columns
from runner.kernels.rms_norm_cpu import norm_all
from runner.kernels.rope_cpu import rope_all
from runner.packed_linear import PackedLinear

if TYPE_CHECKING:
    from runner.decoder import Decoder, DecoderLayer

_LINEARS = ("qkv", "output", "gate_up", "down")
_NORMS = ("input_norm", "attention_norm", "mlp_norm", "output_norm")

# A layer's numbers, in this order: addresses (0: there is none) and what differs between layers.
(_QKV, _QKV_BIAS, _OUTPUT, _OUTPUT_BIAS, _GATE_UP, _GATE_UP_BIAS, _DOWN, _DOWN_BIAS, _INPUT_NORM, _ATTENTION_NORM,
 _MLP_NORM, _OUTPUT_NORM, _QUERY_NORM, _KEY_NORM, _COS, _SIN, _ROTARY_DIM, _WINDOW, _KEYS,
 _VALUES) = range(20)  # fmt: skip
_NUM_FIELDS = 20

# The memory between the parts, [rows, ...] each.
_STREAM, _NORMED, _MERGED, _QUERY, _ATTENDED, _ADDED, _GATED, _ACTIVE, _FOR_LINEAR, _FOR_ATTENTION, _FOR_ROPE = range(
    11
)
_NUM_BUFFERS = 11


@helper
def _linear(tag: Any, team: int, x: int, weights: int, bias: int, out: int, scratch: int, num_rows: int, inputs: int,
            outputs: int) -> None:  # fmt: skip
    fork(team, multiply_columns, (tag, x, inputs * 2, weights, bias, out, outputs * 2, scratch, num_rows, inputs,
                                  outputs))  # fmt: skip


@long_kernel
def _decode(tag: Any, team: int, layers: int, num_layers: int, buffers: int, final_norm: int, out: int, num_rows: int,
            hidden: int, heads: int, kv_heads: int, head_dim: int, inner: int, is_silu: int, unit_offset: int,
            positions: int, index: int, table: int, table_width: int, slots: int, starts: int, seq_lens: int,
            num_entries: int, block_size: int, eps: float, head_eps: float, scale: float,
            softcap: float) -> None:  # fmt: skip
    """`layers`: [num_layers, _NUM_FIELDS] int64. `buffers`: addresses; that of the stream holds the input rows."""
    at, size = rows(LONG, buffers, _NUM_BUFFERS), rows(tag, out, 1).itemsize
    stream, normed, merged, query = at[_STREAM], at[_NORMED], at[_MERGED], at[_QUERY]
    attended, added, gated, active = at[_ATTENDED], at[_ADDED], at[_GATED], at[_ACTIVE]
    merged_dim, head_bytes = (heads + 2 * kv_heads) * head_dim, head_dim * size
    for number in range(num_layers):
        layer = rows(LONG, layers + number * _NUM_FIELDS * 8, _NUM_FIELDS)
        if number == 0:
            norm_all(tag, team, stream, hidden, 0, layer[_INPUT_NORM], normed, 0, num_rows, hidden, eps, unit_offset)
        else:
            norm_all(tag, team, added, hidden, stream, layer[_INPUT_NORM], normed, stream, num_rows, hidden, eps,
                     unit_offset)  # fmt: skip
        _linear(tag, team, normed, layer[_QKV], layer[_QKV_BIAS], merged, at[_FOR_LINEAR], num_rows, hidden, merged_dim)
        keys, values = layer[_KEYS], layer[_VALUES]
        rope_all(tag, team, merged, merged_dim, head_dim, merged + heads * head_bytes, merged_dim, head_dim,
                 merged + (heads + kv_heads) * head_bytes, merged_dim, head_dim, layer[_COS], layer[_SIN],
                 layer[_ROTARY_DIM], positions, keys, values, index, query, layer[_QUERY_NORM], layer[_KEY_NORM],
                 at[_FOR_ROPE], num_rows, heads, kv_heads, head_dim, head_eps, unit_offset)  # fmt: skip
        attend_all(tag, team, query, keys, values, table, table_width, slots, starts, seq_lens, attended,
                   at[_FOR_ATTENTION], num_entries, heads, kv_heads, head_dim, block_size, layer[_WINDOW], scale,
                   softcap)  # fmt: skip
        _linear(tag, team, attended, layer[_OUTPUT], layer[_OUTPUT_BIAS], added, at[_FOR_LINEAR], num_rows,
                heads * head_dim, hidden)  # fmt: skip
        if layer[_ATTENTION_NORM]:
            norm_all(tag, team, added, hidden, 0, layer[_ATTENTION_NORM], added, 0, num_rows, hidden, eps, unit_offset)
        norm_all(tag, team, added, hidden, stream, layer[_MLP_NORM], normed, stream, num_rows, hidden, eps, unit_offset)
        _linear(tag, team, normed, layer[_GATE_UP], layer[_GATE_UP_BIAS], gated, at[_FOR_LINEAR], num_rows, hidden,
                2 * inner)  # fmt: skip
        gate_all(tag, team, gated, active, num_rows, inner, is_silu)
        _linear(tag, team, active, layer[_DOWN], layer[_DOWN_BIAS], added, at[_FOR_LINEAR], num_rows, inner, hidden)
        if layer[_OUTPUT_NORM]:
            norm_all(tag, team, added, hidden, 0, layer[_OUTPUT_NORM], added, 0, num_rows, hidden, eps, unit_offset)
    norm_all(tag, team, added, hidden, stream, final_norm, out, stream, num_rows, hidden, eps, unit_offset)


DECODER = Kernel(_decode, "i" * 23 + "ffff")


class WholeDecoder:
    """Every layer of a decoder, as addresses. It lives no longer than the decoder, which owns what they point to."""

    def __init__(self, decoder: Decoder) -> None:
        layers = decoder.in_order
        first = layers[0]
        self._hidden, self._inner = first.qkv.in_features, first.down.in_features
        self._heads, self._kv_heads, self._head_dim = first.heads, first.kv_heads, first.head_dim
        self._scale, self._softcap, self._is_silu = first.scale, first.softcap or 0.0, first.activation == "silu"
        self._norm, self._head_norm = decoder.norm, first.head_norm
        self._layers = np.zeros((len(layers), _NUM_FIELDS), np.int64)
        for record, layer in zip(self._layers, layers, strict=True):
            _fill(record, layer, decoder)
        self._indices = [layer.index for layer in layers]
        self._caches: list[Tensor] | None = None
        self._buffers = np.zeros(_NUM_BUFFERS, np.int64)
        self._memory: list[Tensor] = []
        self._room = 0
        self._for_linear, self._for_attention, self._for_rope = Scratch(), Scratch(), Scratch()

    def takes(self, positions: Tensor, batch: AttentionBatch) -> bool:
        return type(batch.backend) is CpuAttention and batch.attend_until is None and positions.dim() == 1

    def __call__(self, given: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        """[T, hidden] rows at [T] int64 positions to [T, hidden]."""
        num_rows = len(given)
        self._make_room(num_rows)
        self._find_caches(batch)
        self._memory[_STREAM][:num_rows].copy_(given)
        out = torch.empty(num_rows, self._hidden, dtype=given.dtype)
        norm, head_norm = self._norm, self._head_norm
        DECODER(
            given.dtype, team(), self._layers.ctypes.data, len(self._layers), self._buffers.ctypes.data,
            norm.weight.data_ptr(), out.data_ptr(), num_rows, self._hidden, self._heads, self._kv_heads,
            self._head_dim, self._inner, self._is_silu, norm.unit_offset, positions.data_ptr(),
            batch.cache_index.data_ptr(), batch.block_table.data_ptr(), batch.block_table.shape[1],
            batch.entry_slots.data_ptr(), batch.entry_starts.data_ptr(), batch.seq_lens.data_ptr(), batch.num_entries,
            batch.key_caches[0].shape[1], norm.eps, head_norm.eps if head_norm else 0.0, self._scale, self._softcap,
        )  # fmt: skip
        return out

    def _make_room(self, num_rows: int) -> None:
        if num_rows > self._room:
            self._room = max(num_rows, 2 * self._room)
            attended = self._heads * self._head_dim
            widths = {
                _STREAM: self._hidden, _NORMED: self._hidden, _ADDED: self._hidden, _QUERY: attended,
                _ATTENDED: attended, _MERGED: attended + 2 * self._kv_heads * self._head_dim,
                _GATED: 2 * self._inner, _ACTIVE: self._inner,
            }  # fmt: skip
            self._memory = [torch.zeros(self._room, widths[n], dtype=torch.bfloat16) for n in range(len(widths))]
            self._buffers[: len(widths)] = [memory.data_ptr() for memory in self._memory]
        # Asked for in every call, since the number of threads may change.
        group = self._heads // self._kv_heads
        self._buffers[_FOR_LINEAR] = self._for_linear.address(packed_linear_cpu.scratch_values.py_func(self._room))
        values = attention_cpu.scratch_values(group, self._head_dim)
        self._buffers[_FOR_ATTENTION] = self._for_attention.address(values)
        self._buffers[_FOR_ROPE] = self._for_rope.address(self._head_dim)

    def _find_caches(self, batch: AttentionBatch) -> None:
        if self._caches is not batch.key_caches:
            self._caches = batch.key_caches
            self._layers[:, _KEYS] = [batch.key_caches[index].data_ptr() for index in self._indices]
            self._layers[:, _VALUES] = [batch.value_caches[index].data_ptr() for index in self._indices]


def whole_decoder(decoder: Decoder) -> WholeDecoder | None:
    """None where a layer is another kernel's, or differs from the first in what all have in common here."""
    layers = decoder.in_order
    linears = [getattr(layer, name) for layer in layers for name in _LINEARS]
    if not all(isinstance(linear, PackedLinear) and linear.is_own for linear in linears):
        return None
    if not all(attention_cpu.takes_head_size(torch.bfloat16, layer.head_dim) for layer in layers):
        return None
    norms = [norm for layer in layers for name in _NORMS if (norm := getattr(layer, name)) is not None]
    if len({(norm.eps, norm.unit_offset) for norm in [decoder.norm, *norms]}) != 1:
        return None
    heads = [layer.head_norm for layer in layers if layer.head_norm is not None]
    if any(norm.unit_offset != decoder.norm.unit_offset for norm in heads):
        return None
    if len({_shape(layer) for layer in layers}) != 1:
        return None
    return WholeDecoder(decoder)


def _shape(layer: DecoderLayer) -> tuple[object, ...]:
    heads = layer.head_norm
    sizes = tuple((getattr(layer, name).in_features, getattr(layer, name).out_features) for name in _LINEARS)
    return (layer.heads, layer.kv_heads, layer.head_dim, layer.scale, layer.softcap, layer.activation, sizes,
            None if heads is None else heads.eps)  # fmt: skip


def _fill(record: Any, layer: DecoderLayer, decoder: Decoder) -> None:
    for number, name in enumerate(_LINEARS):
        linear = getattr(layer, name)
        record[2 * number] = linear.address
        record[2 * number + 1] = 0 if linear.bias is None else linear.bias.data_ptr()
    for number, name in enumerate(_NORMS):
        norm = getattr(layer, name)
        record[_INPUT_NORM + number] = 0 if norm is None else norm.weight.data_ptr()
    if layer.head_norm is not None:
        record[_QUERY_NORM] = layer.head_norm.query_weight.data_ptr()
        record[_KEY_NORM] = layer.head_norm.key_weight.data_ptr()
    table = decoder.tables[layer.rope]
    record[[_COS, _SIN, _ROTARY_DIM]] = table.cos.data_ptr(), table.sin.data_ptr(), table.cos.shape[1]
    record[_WINDOW] = layer.window or 0
