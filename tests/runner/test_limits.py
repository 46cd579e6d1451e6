"""What the runner chooses where the operator left it open, and what it refuses, naming the flag to change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runner.config import RunnerConfig
from runner.limits import (
    CPU_KV_BYTES,
    MAX_BLOCKS,
    BadConfiguration,
    Limits,
    choose_device,
    choose_dtype,
    choose_limits,
    choose_num_blocks,
)

GIB = 1 << 30


def model(device: str = "cpu", layers: int = 2) -> Any:
    """2 KV heads of 64 a layer in bf16: 512 bytes a row and layer."""
    return SimpleNamespace(device=torch.device(device), kv_shapes=[(2, 64)] * layers, dtype=torch.bfloat16)


# --- device and dtype -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "there", "expected"),
    [
        ("auto", False, "cpu"),
        ("cpu", False, "cpu"),
        ("cpu", True, "cpu"),
        ("auto", True, "cuda"),
        ("cuda", True, "cuda"),
    ],
)
def test_device(monkeypatch: pytest.MonkeyPatch, asked: Any, there: bool, expected: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert choose_device(RunnerConfig(device=asked)).type == expected


def test_no_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BadConfiguration, match="--device cuda"):
        choose_device(RunnerConfig(device="cuda"))


@pytest.mark.parametrize(
    ("asked", "checkpoint", "cuda", "expected"),
    [
        ("auto", torch.bfloat16, False, torch.bfloat16),
        ("auto", torch.float16, True, torch.float16),
        ("auto", torch.float32, False, torch.float32),
        ("auto", torch.float32, True, torch.bfloat16),
        ("auto", None, False, torch.float32),
        ("auto", None, True, torch.bfloat16),
        ("float32", torch.bfloat16, True, torch.float32),
        ("bfloat16", torch.float32, False, torch.bfloat16),
        ("float16", torch.float32, False, torch.float16),
    ],
)
def test_dtype(
    monkeypatch: pytest.MonkeyPatch, asked: Any, checkpoint: torch.dtype | None, cuda: bool, expected: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    hf_config: Any = SimpleNamespace(dtype=checkpoint)
    assert choose_dtype(RunnerConfig(dtype=asked), hf_config) == expected


# --- lengths --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "device", "expected"),
    [
        ({}, "cpu", Limits(1024, 64, 512)),
        ({}, "cuda", Limits(1024, 256, 8192)),
        ({"max_model_len": 1024, "max_num_seqs": 3, "max_num_batched_tokens": 3}, "cpu", Limits(1024, 3, 3)),
        ({"max_model_len": 100, "max_num_batched_tokens": 99}, "cpu", Limits(100, 64, 99)),
        # Enough for a row of every sequence, though nobody said so.
        ({"max_num_seqs": 700}, "cpu", Limits(1024, 700, 700)),
    ],
)
def test_limits(asked: dict[str, int], device: str, expected: Limits) -> None:
    assert choose_limits(RunnerConfig(**asked), 1024, torch.device(device)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ({"max_model_len": 1025}, "--max-model-len 1025 is more than the model's own 1024"),
        (
            {"max_num_seqs": 9, "max_num_batched_tokens": 8},
            "--max-num-batched-tokens 8 must be at least --max-num-seqs 9",
        ),
        ({"max_num_batched_tokens": 63}, "--max-num-batched-tokens 63 must be at least --max-num-seqs 64"),
    ],
)
def test_limits_that_contradict(asked: dict[str, int], match: str) -> None:
    with pytest.raises(BadConfiguration, match=match):
        choose_limits(RunnerConfig(**asked), 1024, torch.device("cpu"))  # type: ignore[arg-type]


# --- KV blocks ------------------------------------------------------------------------------------------------------

BLOCK_BYTES = 16 * 2 * 512
"""Sixteen rows of two layers, by the numbers of `model`."""


def test_the_asked_number_of_bytes() -> None:
    config = RunnerConfig(kv_cache_memory_bytes=100 * BLOCK_BYTES + BLOCK_BYTES - 1)
    assert choose_num_blocks(config, model(), Limits(64, 64, 512), 0) == 100


def test_the_cpus_default() -> None:
    limits = Limits(max_model_len=1 << 19, max_num_seqs=64, max_num_batched_tokens=512)
    big = model(layers=1)
    assert choose_num_blocks(RunnerConfig(), big, limits, 0) == CPU_KV_BYTES // (BLOCK_BYTES // 2)


def test_the_cpu_takes_no_more_than_slots_can_use() -> None:
    """Every slot at full length, and the dummy."""
    assert choose_num_blocks(RunnerConfig(), model(), Limits(33, 5, 512), 0) == 5 * 3 + 1


def test_memory_that_slots_cannot_use_serves_the_prefix_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40 * GIB, 40 * GIB))
    limits = Limits(33, 5, 512)
    asked = RunnerConfig(kv_cache_memory_bytes=1000 * BLOCK_BYTES)
    assert choose_num_blocks(asked, model(), limits, 0) == 1000
    assert choose_num_blocks(RunnerConfig(), model("cuda", layers=1), limits, 0) == MAX_BLOCKS


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_one_whole_request_must_fit(block_size: int) -> None:
    limits = Limits(max_model_len=100, max_num_seqs=4, max_num_batched_tokens=512)
    needed = -(-100 // block_size) + 1
    size = block_size * 2 * 512
    enough = RunnerConfig(kv_cache_memory_bytes=needed * size, block_size=block_size)
    assert choose_num_blocks(enough, model(), limits, 0) == needed
    short = RunnerConfig(kv_cache_memory_bytes=needed * size - 1, block_size=block_size)
    with pytest.raises(BadConfiguration, match=r"--max-model-len 100 .* raise --kv-cache-memory-bytes"):
        choose_num_blocks(short, model(), limits, 0)


def test_cuda_takes_its_share_of_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The share is of the whole device; what others hold and what a step needs comes off it."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 * GIB, 40 * GIB))
    limits = Limits(1 << 20, 256, 8192)
    config = RunnerConfig(gpu_memory_utilization=0.5)
    cuda = model("cuda")
    assert choose_num_blocks(config, cuda, limits, 2 * GIB) == (20 - 10 - 2) * GIB // BLOCK_BYTES
    with pytest.raises(BadConfiguration, match=r"there are 0 MiB: raise --gpu-memory-utilization"):
        choose_num_blocks(config, cuda, limits, 11 * GIB)


def test_bytes_asked_for_need_no_share_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: pytest.fail("not needed"))
    config = RunnerConfig(kv_cache_memory_bytes=200 * BLOCK_BYTES)
    assert choose_num_blocks(config, model("cuda"), Limits(1024, 256, 8192), 0) == 200
