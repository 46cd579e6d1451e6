"""A decoder of the Llama family (Llama, Mistral, Qwen 2 and 3, Gemma 2 and 3, Phi 3) as few launches a layer.

Built by `runner.fusion` from a loaded transformers model, called by `runner.model`. On a GPU a layer is nine or ten
launches: norm, merged q/k/v, rope with cache write, attention (one or two), output projection, norm, merged gate and
up, activation, down projection. For a row or two norms and activation go into the projections (`kernels.few_rows`); up
to 64 rows the activation does, and projections leave partial sums to what follows them (`kernels.split_k`). Nothing
waits for the device or depends on its data, so a step can be captured. On a CPU all layers may be one call
(`kernels.decoder_cpu`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from runner.attention.backend import AttentionBatch
from runner.kernels import few_rows, split_k
from runner.kernels.activation import Activation, gated
from runner.kernels.few_rows import few_rows_linear
from runner.kernels.rms_norm import add_rms_norm, rms_norm
from runner.kernels.rope import HeadNorm, RopeTable, rope_and_write
from runner.kernels.split_k import gated_linear, split_k_linear

if TYPE_CHECKING:
    from runner.kernels.decoder_cpu import WholeDecoder


@dataclass(frozen=True)
class Norm:
    """RMSNorm; `unit_offset` is Gemma's kind (see `kernels.rms_norm`)."""

    weight: Tensor
    eps: float
    unit_offset: bool

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.unit_offset)

    def after_adding(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(the norm of the sum, the sum)"""
        return add_rms_norm(x, residual, self.weight, self.eps, self.unit_offset)


class DecoderLayer(nn.Module):
    def __init__(self, *, index: int, heads: int, kv_heads: int, head_dim: int, scale: float, window: int | None,
                 softcap: float | None, rope: str, activation: Activation, qkv: nn.Linear, output: nn.Linear,
                 gate_up: nn.Linear, down: nn.Linear, input_norm: Norm, attention_norm: Norm | None, mlp_norm: Norm,
                 output_norm: Norm | None, head_norm: HeadNorm | None) -> None:  # fmt: skip
        """`qkv`: hidden to (heads + 2 * kv_heads) * head_dim. `gate_up`: hidden to 2 * intermediate. `attention_norm`
        and `output_norm`: Gemma's, of what attention and MLP add to the residual stream. `rope`: a key of the
        decoder's tables."""
        super().__init__()
        self.index, self.heads, self.kv_heads, self.head_dim = index, heads, kv_heads, head_dim
        self.scale, self.window, self.softcap, self.rope, self.activation = scale, window, softcap, rope, activation
        self.qkv, self.output, self.gate_up, self.down = qkv, output, gate_up, down
        self.input_norm, self.attention_norm = input_norm, attention_norm
        self.mlp_norm, self.output_norm, self.head_norm = mlp_norm, output_norm, head_norm

    def attend(self, x: Tensor, residual: Tensor | None, table: RopeTable, positions: Tensor,
               batch: AttentionBatch) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(what attention adds to the residual stream, the stream before it), [T, hidden] each.

        Args:
            x, residual: [T, hidden]; the stream is their sum, or x alone. What is added, x here and in the result, may
                be partial sums ([parts, T, hidden], see `kernels.split_k`).
        """
        qkv, stream = _normed_linear(x, residual, self.input_norm, self.qkv)
        sizes = [self.heads, self.kv_heads, self.kv_heads]
        query, key, value = torch.split(qkv.view(*qkv.shape[:-1], -1, self.head_dim), sizes, dim=-2)
        keys, values = batch.key_caches[self.index], batch.value_caches[self.index]
        query = rope_and_write(query, key, value, table, positions, keys, values, batch.cache_index, self.head_norm)
        out = batch.backend.attend(
            query, keys, values, batch, scale=self.scale, window=self.window, softcap=self.softcap
        )
        rows = _linear(out.flatten(1), self.output)
        return (rows if self.attention_norm is None else self.attention_norm(rows)), stream

    def transform(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The same for the MLP."""
        active, stream = _normed_linear(x, residual, self.mlp_norm, self.gate_up, self.activation)
        rows = _linear(active, self.down)
        return (rows if self.output_norm is None else self.output_norm(rows)), stream


class Decoder(nn.Module):
    """From input rows to last hidden states. `tables`: rotations by the kind that layers name."""

    def __init__(self, layers: list[DecoderLayer], norm: Norm, tables: dict[str, RopeTable]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm, self.tables = norm, tables
        self.in_order = layers
        self._whole: WholeDecoder | None = None

    def forward(self, rows: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        """[T, hidden] rows at [T] int64 positions to [T, hidden]."""
        if self._whole is not None and self._whole.takes(positions, batch):
            return self._whole(rows, positions, batch)
        x, residual = rows, None
        for layer in self.in_order:
            x, residual = layer.attend(x, residual, self.tables[layer.rope], positions, batch)
            x, residual = layer.transform(x, residual)
        return self.norm(x) if residual is None else self.norm.after_adding(x, residual)[0]

    def use_one_kernel(self) -> None:
        """For all layers on the CPU, if they are such that it can be. To be called once they are packed."""
        from runner.kernels.decoder_cpu import whole_decoder

        self._whole = whole_decoder(self)


def _linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """[T, N], or partial sums of it."""
    if few_rows.takes(x, layer):
        return few_rows_linear(x, layer.weight, layer.bias)[0]
    if split_k.takes(x, layer):
        return split_k_linear(x, layer.weight, layer.bias)
    rows: Tensor = layer(x)
    return rows


def _normed_linear(x: Tensor, residual: Tensor | None, norm: Norm, layer: nn.Linear,
                   activation: Activation | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(the layer of the norm of the sum, gated where an activation is given; the sum)"""
    if x.dim() == 2 and few_rows.takes(x, layer):
        return few_rows_linear(
            x, layer.weight, layer.bias, residual=residual, norm_weight=norm.weight, eps=norm.eps,
            unit_offset=norm.unit_offset, activation=activation,
        )  # fmt: skip
    normed, total = (norm(x), x) if residual is None else norm.after_adding(x, residual)
    if activation is None:
        return _linear(normed, layer), total
    if split_k.takes(normed, layer):
        return gated_linear(normed, layer.weight, layer.bias, activation), total
    return gated(layer(normed), activation), total
