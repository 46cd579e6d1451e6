"""Hidden states and latent steps of prompts with images, whose rows attend both ways or have positions of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.parity.harness import Harness
from tests.parity.pictures import scene
from tests.parity.test_hidden_states import rows_of
from tests.vision_models import VISION_FAMILIES, VisionFamily, vision_model

TinyVision = Callable[[VisionFamily], Path]
STEPS = 3


@pytest.mark.parametrize("family", VISION_FAMILIES)
@torch.inference_mode()
def test_states_of_prompts_with_images(tiny_vision_model: TinyVision, family: VisionFamily) -> None:
    """What transformers says to the same prompt is what its own head makes of them. Pooled, they are the same."""
    each = scene(tiny_vision_model(family), family, "a0b1c")
    harness = Harness(each.path, async_scheduling=True, max_num_batched_tokens=96)
    # The first of them fills the cache; the whole prompt's states are computed nevertheless.
    numbers = [harness.add(each.pieces, 8, positions=each.positions, return_hidden_states="answer")]
    harness.run()
    numbers.append(harness.add(each.pieces, 8, positions=each.positions, return_hidden_states="all"))
    mean = harness.add(each.pieces, 0, positions=each.positions, return_hidden_states="mean")
    harness.run()
    head = vision_model(each.path).get_output_embeddings()
    for number in numbers:
        assert harness.tokens(number) == each.tokens[:8]
        _, rows = rows_of(harness.answer(number).hidden)
        assert head(rows[-8:]).argmax(-1).tolist() == each.tokens[:8]
    _, whole = rows_of(harness.answer(numbers[1]).hidden)
    _, pooled = rows_of(harness.answer(mean).hidden)
    torch.testing.assert_close(pooled[0], whole[:-7].mean(0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_latent_steps_behind_images(tiny_vision_model: TinyVision, family: VisionFamily) -> None:
    """The same as sending the states back as embeddings, where a token would stand."""
    each = scene(tiny_vision_model(family), family, "a0b1c")
    harness = Harness(each.path, async_scheduling=True, max_num_batched_tokens=96)
    latent = harness.add(
        each.pieces, 8, positions=each.positions, latent_steps=STEPS, return_hidden_states="all", salt="one"
    )
    harness.run()
    start, rows = rows_of(harness.answer(latent).hidden)
    length = len(rows) - STEPS - 7
    thought = rows[length - 1 : length - 1 + STEPS]
    positions = each.positions
    if positions is not None:
        following = positions.max() + 1 + np.arange(STEPS, dtype=np.int32)
        positions = np.concatenate([positions, np.tile(following, (3, 1))], 1)
    sent = harness.add((*each.pieces, thought), 8, positions=positions, salt="two")
    harness.run()
    assert start == 0
    assert harness.tokens(latent) == harness.tokens(sent) != each.tokens[:8]
    harness.assert_empty()
