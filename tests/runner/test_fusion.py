"""Fused decoders against transformers' own eager forward, family by family; and models that aren't fused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from runner.config import RunnerConfig
from runner.decoder import Decoder
from runner.fusion import NotFusable, fuse
from runner.model import Model, UnsupportedModel
from runner.trial import load_checked, trial_batch

ROWS = 24
CPU = torch.device("cpu")
SHARED: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3, "pad_token_id": 0,
}  # fmt: skip
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 64,
    "short_factor": [1.0 + i / 9 for i in range(8)], "long_factor": [2.0 + i for i in range(8)],
}  # fmt: skip

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHARED, head_dim=32),
    "llama, biases": LlamaConfig(**SHARED, attention_bias=True, mlp_bias=True),
    "llama, scaled rope": LlamaConfig(
        **SHARED,
        rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64},
    ),
    "mistral, window": MistralConfig(**SHARED, sliding_window=7, head_dim=16),
    "qwen2": Qwen2Config(**SHARED),
    "qwen2, windows": Qwen2Config(**SHARED, use_sliding_window=True, sliding_window=5, layer_types=SLIDING),
    "qwen3": Qwen3Config(**SHARED, head_dim=32),
    "gemma2": Gemma2Config(
        **SHARED, head_dim=32, query_pre_attn_scalar=40, sliding_window=6, layer_types=SLIDING,
        attn_logit_softcapping=9.0,
    ),
    "gemma3": Gemma3TextConfig(**SHARED, head_dim=32, query_pre_attn_scalar=24, sliding_window=6, layer_types=SLIDING),
    "phi3, window": Phi3Config(**SHARED, sliding_window=9),
    "phi3, partial rotation": Phi3Config(
        **SHARED, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    ),
    "phi3, longrope": Phi3Config(**SHARED, rope_parameters=LONGROPE, original_max_position_embeddings=64),
}  # fmt: skip


def save(config: PretrainedConfig, folder: Path) -> Any:
    """A seeded model, saved; returned as transformers runs it by itself."""
    torch.manual_seed(0)
    hf: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    for module in hf.modules():
        if "norm" in type(module).__name__.lower():
            module.weight.data += 0.3 * torch.randn_like(module.weight)
        elif isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.data.normal_(std=0.5)
    hf.eval().save_pretrained(folder)
    return hf


def load(folder: Path, dtype: torch.dtype, max_model_len: int = 256) -> tuple[Model, Any]:
    config = RunnerConfig(model=str(folder), block_size=4)
    return load_checked(config, str(folder), CPU, dtype, max_model_len)


@torch.inference_mode()
def hidden_of(model: Model, backend: Any, positions: torch.Tensor) -> torch.Tensor:
    batch = trial_batch(model, backend, ROWS, 4)
    return model.forward(model.embed(torch.arange(ROWS) * 5 % 128), positions, batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_fused_layers_compute_what_transformers_does(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    hf = save(CONFIGS[name], tmp_path)
    model, backend = load(tmp_path, dtype)
    assert model.is_fused
    # The last positions: a rope kind that depends on the longest one is then what the decoder was frozen to.
    positions = torch.arange(ROWS) + 256 - ROWS

    def theirs() -> torch.Tensor:
        with torch.inference_mode():
            out = hf.base_model(torch.arange(ROWS)[None] * 5 % 128, position_ids=positions[None])
        return out.last_hidden_state[0].float()  # type: ignore[no-any-return]

    exact = theirs()
    hf.to(dtype)
    # Rounding may fall differently, but not be more of it than transformers' own.
    allowed = max(1.5 * float((theirs() - exact).norm()), 1e-5 * float(exact.norm()))
    assert (hidden_of(model, backend, positions).float() - exact).norm() <= allowed


def test_the_text_model_inside_a_model_of_text_and_images_is_fused(tmp_path: Path) -> None:
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    text = CONFIGS["gemma3"].to_dict()
    hf = save(Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4), tmp_path)
    assert type(hf).__name__ == "Gemma3ForConditionalGeneration"
    model, backend = load(tmp_path, torch.float32)
    assert model.is_fused
    with torch.inference_mode():
        expected = hf.base_model(torch.arange(ROWS)[None] * 5 % 128).last_hidden_state[0]
    assert (hidden_of(model, backend, torch.arange(ROWS)) - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("max_model_len", [2, 5])
def test_a_context_shorter_than_the_trial(max_model_len: int, tmp_path: Path) -> None:
    save(CONFIGS["llama"], tmp_path)
    model, _ = load(tmp_path, torch.float32, max_model_len)
    assert model.is_fused


UNKNOWN: dict[str, tuple[PretrainedConfig, str]] = {
    "sinks": (GptOssConfig(**SHARED, head_dim=16, num_local_experts=2, num_experts_per_tok=1), "s_aux"),
    "both ways": (
        Gemma3TextConfig(**SHARED, head_dim=32, layer_types=SLIDING, use_bidirectional_attention=True), "attends in a"
    ),
    "not ours": (BloomConfig(vocab_size=128, hidden_size=64, n_layer=2, n_head=4), "attention interface"),
    "no such attention": (
        FalconConfig(vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, alibi=True), "load"
    ),
    "latent": (
        DeepseekV3Config(
            **SHARED | {"num_key_value_heads": 4}, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16,
            qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
            n_group=1, topk_group=1,
        ),
        "can't be driven",
    ),
    "none": (MambaConfig(vocab_size=128, hidden_size=64, num_hidden_layers=2), "can't be driven"),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", UNKNOWN)
@pytest.mark.filterwarnings("ignore")
def test_attention_of_an_unknown_kind_is_refused(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """It would be served wrong, without a word."""
    config, reason = UNKNOWN[kind]
    save(config, tmp_path)
    with pytest.raises(UnsupportedModel, match=reason):
        load(tmp_path, dtype)


def test_rotations_of_short_and_long_prompts_are_the_same(tmp_path: Path) -> None:
    """transformers takes other frequencies when the longest sequence of a batch is short: one request would change
    another's answer."""
    hf = save(CONFIGS["phi3, longrope"], tmp_path)
    model, backend = load(tmp_path, torch.float32)
    ids, positions = torch.arange(ROWS)[None] * 5 % 128, torch.arange(ROWS)
    with torch.inference_mode():
        short = hf.base_model(ids, position_ids=positions[None]).last_hidden_state[0]
        # What makes transformers take the long ones is any row far out: here a second sequence.
        far = torch.stack([positions, positions + 256 - ROWS])
        long = hf.base_model(ids.expand(2, -1), position_ids=far).last_hidden_state[0]
    ours = hidden_of(model, backend, positions)
    assert (ours - long).norm() <= 1e-5 * long.norm()
    assert (ours - short).norm() > 1e-2 * short.norm()


def test_a_model_of_another_kind_runs_unfused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hf = save(GraniteConfig(**SHARED, residual_multiplier=0.5, attention_multiplier=0.2), tmp_path)
    with caplog.at_level(logging.WARNING):
        model, backend = load(tmp_path, torch.float32)
    assert not model.is_fused
    assert "GraniteForCausalLM runs unfused" in caplog.text and "GraniteDecoderLayer" in caplog.text
    positions = torch.arange(ROWS)
    with torch.inference_mode():
        expected = hf.base_model(torch.arange(ROWS)[None] * 5 % 128).last_hidden_state[0]
    assert (hidden_of(model, backend, positions) - expected).norm() <= 1e-5 * expected.norm()


def test_layers_that_compute_something_else_are_not_adopted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(CONFIGS["llama"], tmp_path)

    def wrong(hf: Any, max_model_len: int) -> Decoder:
        decoder = fuse(hf, max_model_len)
        decoder.in_order[1].scale *= 2
        return decoder

    monkeypatch.setattr("runner.trial.fuse", wrong)
    with caplog.at_level(logging.WARNING):
        model, _ = load(tmp_path, torch.float32)
    assert not model.is_fused and "differ from the model's" in caplog.text


def test_an_unknown_activation_is_not_guessed(tmp_path: Path) -> None:
    with pytest.raises(NotFusable, match="relu"):
        fuse(save(LlamaConfig(**SHARED, hidden_act="relu"), tmp_path), 64)


def test_moving_rotations_are_refused_where_the_model_is_not_fused(tmp_path: Path) -> None:
    save(LlamaConfig(**SHARED, hidden_act="relu", rope_parameters=LONGROPE), tmp_path)
    with pytest.raises(UnsupportedModel, match="longrope"):
        load(tmp_path, torch.float32)


def test_merging_takes_no_memory_for_good(tmp_path: Path) -> None:
    hf = save(CONFIGS["llama, biases"], tmp_path)
    attention = hf.base_model.layers[0].self_attn
    before = attention.k_proj.weight.clone()
    layer = fuse(hf, 64).in_order[0]
    assert torch.equal(attention.k_proj.weight, before)
    assert attention.k_proj.weight.untyped_storage().data_ptr() == layer.qkv.weight.untyped_storage().data_ptr()
