"""The model: transformers' own modelling code, called with flattened rows and our attention.

Built by the runner at start, called by `runner.device_step`. A model is refused at load, with the reason, when its head
or its rope can't be driven this way; it is never run wrong.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from runner.attention.backend import IMPLEMENTATION, AttentionBatch
from runner.config import RunnerConfig
from runner.packed_linear import can_pack, pack_linears


class UnsupportedModel(Exception):
    """The model can't be served. The message says why; fit for the operator."""


class Model:
    """A causal language model on its device, in evaluation mode.

    `embedding_table` is [vocab, hidden] where the model's input embedding is a plain table look-up, else None (Gemma
    scales: such a model is asked through `embed`).
    """

    def __init__(self, hf: PreTrainedModel, path: str) -> None:
        self.path = path
        self.config: PretrainedConfig = hf.config.get_text_config()
        self._backbone: nn.Module = hf.base_model
        self._head = _Head(hf)
        self._embedding: nn.Module = hf.get_input_embeddings()
        weight = cast(Tensor, self._embedding.weight)
        self.vocab_size, self.hidden_size = weight.shape
        self.embedding_table = weight.data if type(self._embedding) is nn.Embedding else None
        self.dtype, self.device = weight.dtype, weight.device
        self.kv_shapes = _kv_shapes(hf)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def max_positions(self) -> int:
        return int(self.config.max_position_embeddings)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] ids to [T, hidden] rows, as the model's own embedding makes them (scaling included)."""
        rows: Tensor = self._embedding(token_ids.long())
        return rows

    def forward(self, rows: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        """[T, hidden] input rows and [T] int64 positions to [T, hidden] last hidden states."""
        out = self._backbone(
            inputs_embeds=rows[None], position_ids=positions[None], use_cache=False, attention_batch=batch
        )
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] to [N, vocab] float32, with the model's own logit scale and cap."""
        return self._head(hidden)[:, : self.vocab_size].float()

    @torch.inference_mode()
    def check_head(self, hf: PreTrainedModel, batch: AttentionBatch) -> None:
        """Compares our head with the model's whole forward; raises `UnsupportedModel` where they differ.

        Heads differ between architectures in ways that no common attribute tells of (scales, caps, extra layers).
        """
        count = len(batch.positions)
        rows = self.embed(torch.arange(count, device=self.device) % self.vocab_size)
        positions = batch.positions
        ours = self.logits(self.forward(rows, positions, batch))
        theirs = hf(
            inputs_embeds=rows[None], position_ids=positions[None], use_cache=False, attention_batch=batch
        ).logits[0, :, : self.vocab_size]
        spread = theirs.float().std().clamp(min=1e-6)
        if not bool(((ours - theirs.float()).abs() <= 0.05 * spread).all()):
            raise UnsupportedModel(f"{type(hf).__name__} changes its logits in a way that this server doesn't know")


class _Head:
    """lm_head with what the known families do to its output."""

    def __init__(self, hf: PreTrainedModel) -> None:
        config = hf.config.get_text_config()
        self._lm_head = hf.get_output_embeddings()
        if self._lm_head is None:
            raise UnsupportedModel(f"{type(hf).__name__} has no language-model head")
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        # Cohere multiplies, Granite divides.
        self._scale: float = getattr(config, "logit_scale", None) or 1.0
        self._scale /= getattr(config, "logits_scaling", None) or 1.0

    def __call__(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._lm_head(hidden)
        if self._scale != 1.0:
            logits = logits * self._scale
        if self._softcap is not None:
            logits = self._softcap * torch.tanh(logits / self._softcap)
        return logits


def read_model_config(config: RunnerConfig, path: str) -> PretrainedConfig:
    """The model's own configuration. Raises `UnsupportedModel` where there is none that can be read."""
    try:
        hf_config: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedModel(f"can't read the configuration of model {path!r}: {error}") from error
    return hf_config


def load_model(
    config: RunnerConfig, path: str, device: torch.device, dtype: torch.dtype
) -> tuple[Model, PreTrainedModel]:
    """Loads (or, with load_format "dummy", makes) the model and returns it with the transformers module behind it.

    Raises:
        UnsupportedModel
    """
    hf_config = read_model_config(config, path)
    _refuse_moving_rope(hf_config.get_text_config())
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": IMPLEMENTATION}
    try:
        if config.load_format == "dummy":
            hf = _dummy(hf_config, config, device, options)
        else:
            hf = AutoModelForCausalLM.from_pretrained(
                path, config=hf_config, trust_remote_code=config.trust_remote_code, **options
            )
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"can't load model {path!r}: {error}") from error
    hf.eval().requires_grad_(False)
    hf.to(device)
    if device.type == "cpu" and dtype == torch.bfloat16 and can_pack():
        pack_linears(hf)
    return Model(hf, path), hf


def _dummy(
    hf_config: PretrainedConfig, config: RunnerConfig, device: torch.device, options: dict[str, Any]
) -> PreTrainedModel:
    """Random weights, made on the device: for measuring, where only shapes matter."""
    torch.manual_seed(config.seed)
    hf_config.dtype = options["dtype"]
    before = torch.get_default_dtype()
    torch.set_default_dtype(options["dtype"])
    try:
        with torch.device(device):
            hf = AutoModelForCausalLM.from_config(hf_config, trust_remote_code=config.trust_remote_code, **options)
    finally:
        torch.set_default_dtype(before)
    hf.generation_config = GenerationConfig.from_model_config(hf_config)
    return hf


def _kv_shapes(hf: PreTrainedModel) -> list[tuple[int, int]]:
    """(num_kv_heads, head_dim) of each layer's keys and values, by layer_idx."""
    config = hf.config.get_text_config()
    heads: int = config.num_attention_heads
    kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    return [(kv_heads, head_dim)] * int(config.num_hidden_layers)


def _refuse_moving_rope(config: PretrainedConfig) -> None:
    """Some rope kinds pick their frequencies from the longest position of the whole batch: one request would change
    another's answer."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    for kind in kinds:
        name = kind.get("rope_type", kind.get("type"))
        if name in ("dynamic", "longrope"):
            raise UnsupportedModel(f"rope type {name!r} depends on the batch and isn't supported")
