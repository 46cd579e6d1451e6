"""The model, called with flattened rows and our attention: fused where its kind is known, else as transformers has it.

Built by `runner.trial` at start, called by `runner.device_step`. A model is refused at load, with the reason, when its
head, its attention or its rope can't be driven this way; it is never run wrong.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from runner.attention.backend import IMPLEMENTATION, AttentionBatch
from runner.config import RunnerConfig
from runner.decoder import Decoder
from runner.fusion import NotFusable
from runner.packed_linear import PackedLinear, can_pack, pack_linears
from runner.vision import FAMILIES, Vision

_MODEL_SUFFIXES = (".safetensors", ".bin", ".json", ".model", ".txt", ".jinja")


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
        self.vision = Vision.of(hf)
        """None: text only."""
        self._backbone: nn.Module | None = hf.base_model
        self._decoder: Decoder | None = None
        self._head = _Head(hf)
        self._embedding: nn.Module = hf.get_input_embeddings()
        weight = cast(Tensor, self._embedding.weight)
        self.vocab_size, self.hidden_size = weight.shape
        self.dtype, self.device = weight.dtype, weight.device
        self.kv_shapes = _kv_shapes(hf)
        text_model = getattr(hf.base_model, "language_model", hf.base_model)
        self.num_weights = sum(p.numel() for p in text_model.parameters()) - weight.numel()
        """Of the layers: embedding and head left out."""

    @property
    def embedding_table(self) -> Tensor | None:
        return self._embedding.weight.data if type(self._embedding) is nn.Embedding else None

    @property
    def embedding_scale(self) -> float:
        """What `embed` multiplies rows of the table by, rounded as it is there."""
        scale = float(getattr(self._embedding, "embed_scale", 1.0))
        return float(torch.tensor(scale, dtype=self.dtype))

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def two_way(self) -> bool:
        """Some rows may attend in both directions."""
        return self.vision is not None and self.vision.info.two_way

    @property
    def mrope(self) -> bool:
        """Rows have positions in three dimensions."""
        return self.vision is not None and self.vision.info.mrope

    @property
    def is_fused(self) -> bool:
        return self._decoder is not None

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] ids to [T, hidden] rows, as the model's own embedding makes them (scaling included)."""
        rows: Tensor = self._embedding(token_ids.long())
        return rows

    def forward(self, rows: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        """[T, hidden] input rows and [T] int64 positions (or [3, T], see `mrope`) to [T, hidden] last hidden states."""
        if self._decoder is not None:
            return cast(Tensor, self._decoder(rows, positions, batch))
        return self._unfused(rows, positions, batch)

    def _unfused(self, rows: Tensor, positions: Tensor, batch: AttentionBatch | None) -> Tensor:
        """`batch` is None where transformers' own attention runs (at load)."""
        ours = {} if batch is None else {"attention_batch": batch}
        out = cast(nn.Module, self._backbone)(
            inputs_embeds=rows[None], position_ids=positions.unsqueeze(-2), use_cache=False, **ours
        )
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[N, hidden] to [N, vocab] in the model's dtype, with the model's own logit scale and cap.

        Args:
            out: where the result goes ([N, vocab], contiguous); made anew where None.
        """
        if out is None:
            out = torch.empty(len(hidden), self.vocab_size, dtype=self.dtype, device=self.device)
        self._head(hidden, out)
        return out

    # --- at load ----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def check_head(self, hf: PreTrainedModel, batch: AttentionBatch) -> None:
        """Compares our head with the model's whole forward; raises `UnsupportedModel` where they differ.

        Heads differ between architectures in ways that no common attribute tells of (scales, caps, extra layers).
        """
        rows = self._trial_rows(batch)
        ours = self.logits(self._unfused(rows, batch.positions, batch)).float()
        theirs = hf(
            inputs_embeds=rows[None], position_ids=batch.positions[None], use_cache=False, attention_batch=batch
        ).logits[0, :, : self.vocab_size]
        spread = theirs.float().std().clamp(min=1e-6)
        if not bool(((ours - theirs.float()).abs() <= 0.05 * spread).all()):
            raise UnsupportedModel(f"{type(hf).__name__} changes its logits in a way that this server doesn't know")

    @torch.inference_mode()
    def check_attention(self, hf: PreTrainedModel, batch: AttentionBatch) -> None:
        """Compares the model on our attention with the model on transformers' plain one.

        Raises:
            UnsupportedModel: they differ (sinks, position biases, attention to what follows), or ours isn't asked.
        """
        rows, name = self._trial_rows(batch), type(hf).__name__
        for cache in batch.key_caches:
            cache.fill_(1.0)
        ours = self._unfused(rows, batch.positions, batch).float()
        if any(bool((cache == 1.0).all()) for cache in batch.key_caches):
            raise UnsupportedModel(f"{name} has layers that don't support transformers' attention interface")
        hf.set_attn_implementation("eager")
        try:
            theirs = self._unfused(rows, batch.positions, None).float()
        finally:
            hf.set_attn_implementation(_implementation(hf.config))
        error = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-6))
        # Looser than for our own layers: what is refused here isn't served at all, and experts may be chosen otherwise.
        if not error <= 3 * _ROUNDING[self.dtype]:
            raise UnsupportedModel(f"{name} attends in a way that this server doesn't know: {error:.2g} apart")

    @torch.inference_mode()
    def adopt(self, decoder: Decoder, max_model_len: int, batch: AttentionBatch) -> None:
        """Takes a rewritten decoder for its own, if it computes what the model does.

        Raises:
            NotFusable: it doesn't.
        """
        rows = self._trial_rows(batch)
        # At the last positions, where a rope kind that depends on the longest one is what the decoder froze it to.
        positions = batch.positions + (max_model_len - len(rows))
        ours, theirs = decoder(rows, positions, batch).float(), self._unfused(rows, positions, batch).float()
        error = float((ours - theirs).norm() / theirs.norm())
        if not error <= _ROUNDING[self.dtype]:
            raise NotFusable(f"the rewritten layers differ from the model's by {error:.2g} of their norm")
        self._decoder, self._backbone = decoder, None
        if self.vision is not None:
            self.vision.drop_text_model()

    def _trial_rows(self, batch: AttentionBatch) -> Tensor:
        return self.embed(torch.arange(len(batch.positions), device=self.device) % self.vocab_size)

    def pack(self) -> None:
        """On a CPU that multiplies bfloat16 itself: lays the weights out for it. Call when nothing else holds the
        transformers model, so that the plain weights go."""
        if self.device.type == "cpu" and self.dtype == torch.bfloat16 and can_pack():
            body = self._decoder if self._decoder is not None else cast(nn.Module, self._backbone)
            pack_linears(nn.ModuleList([body, self._head, self._embedding]))
            if self._decoder is not None:
                self._decoder.use_one_kernel()


_ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""How far, relative to the norm of all, two orders of the same sums may be apart after a model's depth."""


class _Head(nn.Module):
    """lm_head with what the known families do to its output."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        config = hf.config.get_text_config()
        self._lm_head = hf.get_output_embeddings()
        if self._lm_head is None:
            raise UnsupportedModel(f"{type(hf).__name__} has no language-model head")
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        # Cohere multiplies, Granite divides.
        self._scale: float = getattr(config, "logit_scale", None) or 1.0
        self._scale /= getattr(config, "logits_scaling", None) or 1.0

    def forward(self, hidden: Tensor, out: Tensor) -> None:
        """[N, hidden] to out: [N, vocab]; a head with more rows than the vocabulary is cut."""
        lm_head = self._lm_head
        if hidden.is_cuda and type(lm_head) is nn.Linear and getattr(lm_head, "bias", None) is None:
            torch.mm(hidden, lm_head.weight[: out.shape[1]].t(), out=out)
        elif isinstance(lm_head, PackedLinear) and lm_head.writes(out):
            lm_head.write(hidden, out)
        else:
            out.copy_(lm_head(hidden)[:, : out.shape[1]])
        if self._scale != 1.0:
            out.mul_(self._scale)
        if self._softcap is not None:
            out.div_(self._softcap).tanh_().mul_(self._softcap)


def read_model_config(config: RunnerConfig, path: str) -> PretrainedConfig:
    """The model's own configuration. Raises `UnsupportedModel` where there is none that can be read."""
    if path.startswith(("/", "./", "../", "~")) and not Path(path).is_dir():  # No hub id looks like that.
        raise UnsupportedModel(f"can't read the configuration of model {path!r}: there is no such folder")
    if Path(path).is_dir():
        _check_readable(Path(path))
    try:
        hf_config: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedModel(f"can't read the configuration of model {path!r}: {error}") from error
    return hf_config


def _check_readable(folder: Path) -> None:
    """A container's user is seldom the one who has made the files. The libraries would say that there are none."""
    may_list = os.access(folder, os.R_OK | os.X_OK, effective_ids=True)
    files = [file for file in sorted(folder.iterdir()) if file.suffix in _MODEL_SUFFIXES] if may_list else [folder]
    for file in files:
        if not os.access(file, os.R_OK, effective_ids=True):
            raise UnsupportedModel(f"user {os.geteuid()} may not read {str(file)!r}: chmod -R a+rX lets everybody")


def max_positions(hf_config: PretrainedConfig) -> int:
    """What the model was made for. Raises `UnsupportedModel` where its configuration doesn't say."""
    positions = getattr(hf_config, "max_position_embeddings", None)
    if positions is None:
        raise UnsupportedModel(f"a model of type {hf_config.model_type!r} states no number of positions")
    return int(positions)


def load_model(config: RunnerConfig, path: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Loads (or, with load_format "dummy", makes) the transformers module.

    Raises:
        UnsupportedModel
    """
    hf_config = read_model_config(config, path)
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": _implementation(hf_config)}
    kind = AutoModelForImageTextToText if hf_config.model_type in FAMILIES else AutoModelForCausalLM
    try:
        if config.load_format == "dummy":
            hf = _dummy(kind, hf_config, config, device, options)
        else:
            hf = kind.from_pretrained(path, config=hf_config, trust_remote_code=config.trust_remote_code, **options)
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedModel(f"can't load model {path!r}: {error}") from error
    hf.eval().requires_grad_(False)
    hf.to(device)
    return hf


def _implementation(hf_config: PretrainedConfig) -> str | dict[str, str]:
    """Ours, but not for a vision tower: there is no cache in it."""
    if hf_config.model_type not in FAMILIES:
        return IMPLEMENTATION
    return {"": IMPLEMENTATION, "text_config": IMPLEMENTATION, "vision_config": "sdpa"}


def _dummy(
    kind: Any, hf_config: PretrainedConfig, config: RunnerConfig, device: torch.device, options: dict[str, Any]
) -> PreTrainedModel:
    """Random weights, made on the device: for measuring, where only shapes matter."""
    torch.manual_seed(config.seed)
    hf_config.dtype = options["dtype"]
    before = torch.get_default_dtype()
    torch.set_default_dtype(options["dtype"])
    try:
        with torch.device(device):
            hf = kind.from_config(hf_config, trust_remote_code=config.trust_remote_code, **options)
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


def refuse_moving_rope(config: PretrainedConfig) -> None:
    """Some rope kinds pick their frequencies from the longest position of the whole batch: one request would change
    another's answer. (A fused model's are frozen at its longest position.)"""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    for kind in kinds:
        name = kind.get("rope_type", kind.get("type"))
        if name in ("dynamic", "longrope"):
            raise UnsupportedModel(f"rope type {name!r} depends on the batch and isn't supported")
