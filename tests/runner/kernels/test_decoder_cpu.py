"""All layers in one call against one kernel at a time. (Both are held against transformers in `test_fusion`.)"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import GemmaConfig, LlamaConfig, PretrainedConfig, Qwen3Config

from runner.attention.backend import AttentionBatch
from runner.attention.cpu_attention import CpuAttention
from runner.decoder import Decoder
from runner.kv_cache import KVCache
from runner.model import Model
from tests.runner.test_fusion import CONFIGS, SHARED, load, save

BLOCK = 4
STEPS = ((7, 20), (1, 1, 30), (1, 1, 1), (1, 1, 1, 90))
"""Rows of each sequence in steps that follow each other: chunks, decodes, both."""


def run(model: Model, steps: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    """The hidden states of each step, then the caches."""
    cache = KVCache(model.kv_shapes, 128, BLOCK, model.dtype, model.device)
    table = torch.randperm(127, generator=torch.Generator().manual_seed(0))[:120].view(4, 30).int() + 1
    done, found = [0] * 4, []
    for number, counts in enumerate(steps):
        slots = torch.arange(len(counts), dtype=torch.int32)
        places = [(slot, done[slot] + i) for slot, count in enumerate(counts) for i in range(count)]
        index = torch.tensor([int(table[slot, at // BLOCK]) * BLOCK + at % BLOCK for slot, at in places])
        positions = torch.tensor([at for _, at in places])
        done = [done[slot] + (counts[slot] if slot < len(counts) else 0) for slot in range(4)]
        starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
        batch = AttentionBatch(
            backend=CpuAttention(), key_caches=cache.keys, value_caches=cache.values, block_table=table,
            entry_slots=slots, entry_starts=torch.tensor(starts).int(),
            seq_lens=torch.tensor(done[: len(counts)]).int(), positions=positions, cache_index=index,
            num_entries=len(counts), num_decodes=sum(count == 1 for count in counts), max_seq_len=max(done),
            host_starts=starts, host_seq_lens=done[: len(counts)],
        )  # fmt: skip
        rows = model.embed((positions * 7 + number) % 128)
        found.append(model.forward(rows, positions, batch).clone())
    return [*found, *cache.keys, *cache.values]


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_one_call_computes_what_one_kernel_at_a_time_does(name: str, threads: int, tmp_path: Path) -> None:
    save(CONFIGS[name], tmp_path)
    model, _ = load(tmp_path, torch.bfloat16)
    assert model._decoder is not None
    whole = model._decoder._whole
    if whole is None:
        pytest.skip("this machine's linear layers are another library's")
    ours = run(model, STEPS)
    model._decoder._whole = None
    for one, other in zip(ours, run(model, STEPS), strict=True):
        assert one.isfinite().all() and torch.equal(one, other)


@torch.inference_mode()
def test_caches_that_change_are_found(tmp_path: Path) -> None:
    save(CONFIGS["llama"], tmp_path)
    model, _ = load(tmp_path, torch.bfloat16)
    first, second = run(model, STEPS), run(model, STEPS)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_layers_of_different_shapes_are_left_alone(tmp_path: Path) -> None:
    save(CONFIGS["llama"], tmp_path)
    model, _ = load(tmp_path, torch.bfloat16)
    decoder = model._decoder
    assert decoder is not None
    if not is_whole(decoder):
        pytest.skip("this machine's linear layers are another library's")
    layer = decoder.in_order[1]
    layer.scale *= 2
    decoder.use_one_kernel()
    assert not is_whole(decoder)
    layer.scale /= 2
    layer.mlp_norm = replace(layer.mlp_norm, eps=0.5)
    decoder.use_one_kernel()
    assert not is_whole(decoder)
    layer.mlp_norm = replace(layer.mlp_norm, eps=decoder.norm.eps)
    decoder.use_one_kernel()
    assert is_whole(decoder)


def test_norms_of_two_kinds_are_left_alone(tmp_path: Path) -> None:
    """Even in a model of one layer, whose shape has nothing to differ from."""
    config = Qwen3Config(**{**SHARED, "num_hidden_layers": 1}, head_dim=32)
    save(config, tmp_path)
    model, _ = load(tmp_path, torch.bfloat16)
    decoder = model._decoder
    assert decoder is not None
    layer = decoder.in_order[0]
    assert layer.head_norm is not None
    layer.head_norm = replace(layer.head_norm, unit_offset=not decoder.norm.unit_offset)
    decoder.use_one_kernel()
    assert not is_whole(decoder)


def test_odd_head_sizes_are_left_alone(tmp_path: Path) -> None:
    """A partial rotation allows for them."""
    save(CONFIGS["llama"], tmp_path)
    model, _ = load(tmp_path, torch.bfloat16)
    assert model._decoder is not None
    for layer in model._decoder.in_order:
        layer.head_dim = 15
    model._decoder.use_one_kernel()
    assert not is_whole(model._decoder)


def is_whole(decoder: Decoder) -> bool:
    return decoder._whole is not None


@pytest.mark.parametrize("config", [LlamaConfig(**SHARED), GemmaConfig(**SHARED)], ids=["fp32", "unknown"])
def test_other_models_have_none(config: PretrainedConfig, tmp_path: Path) -> None:
    save(config, tmp_path)
    model, _ = load(tmp_path, torch.float32)
    assert model._decoder is None or model._decoder._whole is None
