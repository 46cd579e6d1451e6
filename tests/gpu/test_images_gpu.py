"""Prompts with images on the GPU: fp32 matches transformers' greedy tokens exactly, captured and eager."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.parity.harness import Harness
from tests.parity.pictures import scene
from tests.vision_models import VisionFamily

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
FAMILIES: tuple[VisionFamily, ...] = ("gemma3", "llava", "qwen2_vl", "qwen2_5_vl")
LAYOUTS = ("ab", "0a", "a0b", "a0b1c", "abcdef01")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("num_blocks", [None, 40])
def test_float32_parity(
    tiny_vision_model: Callable[[VisionFamily], Path], family: VisionFamily, enforce_eager: bool, num_blocks: int | None
) -> None:
    """Small chunks; with few blocks preemption, too; the second time from the prefix cache."""
    path = tiny_vision_model(family)
    scenes = [scene(path, family, layout) for layout in LAYOUTS]
    harness = Harness(
        path, device="cuda", num_blocks=num_blocks or 200, block_size=16 if num_blocks is None else 4,
        async_scheduling=True, max_num_batched_tokens=24, enforce_eager=enforce_eager,
    )  # fmt: skip
    for _ in range(2):
        numbers = [
            (harness.add(each.pieces if mixed is None else each.mixed(mixed), positions=each.positions), each)
            for each in scenes
            for mixed in (None, 0)
        ]
        harness.run()
        assert all(harness.tokens(number) == each.tokens for number, each in numbers)
    assert harness.engine.stats().prefix_hits > 0
    assert (harness.engine.stats().preemptions > 0) == (num_blocks is not None)
    harness.assert_empty()
