"""Rewrites a loaded transformers model into `runner.decoder`'s layers: projections merged, norms and rope fused.

Called by `runner.trial` after loading. Only decoder layers known by their class are rewritten, since what a module
computes can't be told from its parts; the result is then held against the model's own forward (`Model.adopt`). A model
that doesn't fit runs as transformers wrote it, and the log says why.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from runner.decoder import Decoder, DecoderLayer, Norm
from runner.kernels.activation import Activation
from runner.kernels.rope import HeadNorm, RopeTable

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


class NotFusable(Exception):
    """The model isn't of a kind that is rewritten. The message says what doesn't fit."""


def fuse(hf: PreTrainedModel, max_model_len: int) -> Decoder:
    """The model's layers, merged. Takes no memory for good: the model's projections become views of the merged ones.

    Args:
        max_model_len: positions that rotations are needed for. A rope kind that depends on the longest position of the
            batch (dynamic, longrope) is frozen at this one.

    Raises:
        NotFusable
    """
    # A model of text and images has the text model inside.
    backbone = getattr(hf.base_model, "language_model", hf.base_model)
    layers = list(cast(Any, backbone).layers) if hasattr(backbone, "layers") else []
    family = _family(layers)
    if type(backbone).__module__ != _module(family):
        raise NotFusable(f"{type(backbone).__name__} is not {family}'s own text model")
    activation = _activation(backbone.config)
    fused = [_layer(family, layer, layer.self_attn, layer.mlp, activation) for layer in layers]
    return Decoder(fused, _norm(family, cast(Any, backbone).norm), _rope_tables(backbone, fused, max_model_len))


def _module(family: str) -> str:
    return f"transformers.models.{family}.modeling_{family}"


def _family(layers: list[nn.Module]) -> str:
    kinds = {(type(layer).__module__, type(layer).__name__) for layer in layers}
    for family in _FAMILIES:
        if kinds == {(_module(family), f"{family.capitalize()}DecoderLayer")}:
            return family
    names = ", ".join(sorted(name for _, name in kinds)) or "a model without a list of layers"
    raise NotFusable(f"no rewrite is known for {names}")


def _activation(config: Any) -> Activation:
    name = getattr(config, "hidden_activation", None) or config.hidden_act
    if name not in _ACTIVATIONS:
        raise NotFusable(f"activation {name!r}")
    return _ACTIVATIONS[name]


def _layer(family: str, layer: Any, attention: Any, mlp: Any, activation: Activation) -> DecoderLayer:
    for linear in (attention.o_proj, mlp.down_proj):
        if type(linear) is not nn.Linear:
            raise NotFusable(f"{type(linear).__name__} in the place of a linear layer")
    gemma, merged = family.startswith("gemma"), family == "phi3"
    config = attention.config
    window = attention.sliding_window if hasattr(attention, "sliding_window") else None
    if family in ("mistral", "phi3"):
        window = config.sliding_window
    head_norm = None
    if hasattr(attention, "q_norm"):
        q_norm, k_norm = _norm(family, attention.q_norm), _norm(family, attention.k_norm)
        head_norm = HeadNorm(q_norm.weight, k_norm.weight, q_norm.eps, q_norm.unit_offset)
    return DecoderLayer(
        index=attention.layer_idx,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        scale=attention.scaling,
        window=window,
        softcap=attention.attn_logit_softcapping if family == "gemma2" else None,
        rope=attention.layer_type if family == "gemma3" else "",
        activation=activation,
        qkv=_merged([attention.qkv_proj] if merged else [attention.q_proj, attention.k_proj, attention.v_proj]),
        output=attention.o_proj,
        gate_up=_merged([mlp.gate_up_proj] if merged else [mlp.gate_proj, mlp.up_proj]),
        down=mlp.down_proj,
        input_norm=_norm(family, layer.input_layernorm),
        attention_norm=_norm(family, layer.post_attention_layernorm) if gemma else None,
        mlp_norm=_norm(family, layer.pre_feedforward_layernorm if gemma else layer.post_attention_layernorm),
        output_norm=_norm(family, layer.post_feedforward_layernorm) if gemma else None,
        head_norm=head_norm,
    )


def _norm(family: str, module: Any) -> Norm:
    gemma = family.startswith("gemma")
    return Norm(module.weight.data.clone(), module.eps if gemma else module.variance_epsilon, unit_offset=gemma)


@torch.no_grad()
def _merged(linears: list[nn.Linear]) -> nn.Linear:
    """One layer with the outputs of all, side by side; the given ones become views of it."""
    first = linears[0]
    if any(type(linear) is not nn.Linear for linear in linears):
        raise NotFusable(f"{type(first).__name__} in the place of a linear layer")
    if len(linears) == 1:
        return first
    sizes = [linear.out_features for linear in linears]
    has_bias = getattr(first, "bias", None) is not None
    merged = nn.Linear(first.in_features, sum(sizes), bias=has_bias, device="meta")
    for name in ("weight", "bias") if has_bias else ("weight",):
        joined = torch.cat([getattr(linear, name).data for linear in linears])
        setattr(merged, name, nn.Parameter(joined, requires_grad=False))
        for linear, part in zip(linears, torch.split(joined, sizes), strict=True):
            getattr(linear, name).data = part
    return merged


@torch.no_grad()
def _rope_tables(backbone: Any, layers: list[DecoderLayer], max_model_len: int) -> dict[str, RopeTable]:
    """By the name that layers know their kind by; computed by the model's own module."""
    weight: Tensor = layers[0].qkv.weight
    positions = torch.arange(max_model_len, device=weight.device)[None]
    like = torch.empty(0, dtype=weight.dtype, device=weight.device)
    tables = {}
    for kind in {layer.rope for layer in layers}:
        cos, sin = backbone.rotary_emb(like, positions, *([kind] if kind else []))
        tables[kind] = RopeTable(cos[0].contiguous(), sin[0].contiguous())
    return tables
