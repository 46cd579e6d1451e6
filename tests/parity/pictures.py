"""Prompts with images and what the model says to them: the oracle is transformers' `generate` on its own processor's
output."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.parity.harness import Picture, Piece, Prompt
from tests.vision_models import FIXED_ROWS, PLACEHOLDER, VisionFamily, generate, picture, processed, vision_model

_WORDS = ("wood", " grain", " and sand", " the piece", " of maple", "? is it", " a shadow", " glued", " pressed", ".")


@dataclass(frozen=True)
class Scene:
    """A text with images in it, and its greedy continuation."""

    path: Path
    text: str
    images: tuple[int, ...]
    """Seeds of what they show."""
    pieces: tuple[Piece, ...]
    """Ids and pictures in turn."""
    tokens: list[int]
    positions: NDArray[np.int32] | None
    """[3, prompt_len], where the model has such."""

    def mixed(self, seed: int) -> Prompt:
        """The same prompt with some of its tokens as embeddings."""
        rng = random.Random(seed)
        pieces: list[Piece] = []
        for piece in self.pieces:
            if isinstance(piece, list) and len(piece) > 2:
                start, end = sorted(rng.sample(range(len(piece) + 1), 2))
                pieces += [p for p in (piece[:start], embedded(self.path, piece[start:end]), piece[end:]) if len(p)]
            else:
                pieces.append(piece)
        return tuple(pieces)


@torch.inference_mode()
def embedded(path: Path, ids: Sequence[int]) -> Tensor:
    rows: Tensor = vision_model(path).get_input_embeddings()(torch.tensor(ids))
    return rows.clone()


@functools.cache
def scene(path: Path, family: VisionFamily, layout: str, seed: int = 0, max_new_tokens: int = 32) -> Scene:
    """`layout`: a word for each letter, an image for each digit (which image: equal ones show the same). The first of
    fifty texts whose continuation is varied and nowhere near a tie."""
    for attempt in range(50):
        rng = random.Random(f"{layout} {seed} {attempt}")
        text = "".join(PLACEHOLDER[family] if c.isdigit() else rng.choice(_WORDS) for c in layout)
        images = tuple(100 * attempt + 10 * seed + int(c) for c in layout if c.isdigit())
        inputs = processed(path, text, [_shown(family, each) for each in images])
        tokens = generate(path, inputs, max_new_tokens)
        if tokens is not None and len(set(tokens)) >= max_new_tokens // 4:
            return Scene(path, text, images, _pieces(path, inputs), tokens, _positions(path, inputs))
    raise AssertionError("no usable scene in fifty")


def _shown(family: VisionFamily, seed: int) -> Any:
    # Where the size of an image decides over its rows, not all are alike.
    return picture(seed) if family in ("gemma3", "llava") else picture(seed, 40 + 16 * (seed % 3), 40)


def _pieces(path: Path, inputs: Any) -> tuple[Piece, ...]:
    config = vision_model(path).config
    ids, pixels = inputs["input_ids"][0].tolist(), inputs.get("pixel_values")
    grids = inputs["image_grid_thw"].tolist() if "image_grid_thw" in inputs else None
    pieces: list[Piece] = []
    at = patch = image = 0
    while at < len(ids):
        end = at
        is_image = ids[at] == config.image_token_id
        if is_image and grids is not None:
            grid = tuple(grids[image])
            patches = int(np.prod(grid))
            end = at + patches // config.vision_config.spatial_merge_size**2
            pieces.append(Picture(pixels[patch : patch + patches].numpy(), end - at, grid))
            patch += patches
        else:
            most = at + FIXED_ROWS if is_image else len(ids)
            while end < most and (ids[end] == config.image_token_id) == is_image:
                end += 1
            pieces.append(Picture(pixels[image : image + 1].numpy(), end - at) if is_image else ids[at:end])
        image += is_image
        at = end
    return tuple(pieces)


def _positions(path: Path, inputs: Any) -> NDArray[np.int32] | None:
    model = vision_model(path).model
    if not hasattr(model, "get_rope_index") or "image_grid_thw" not in inputs:
        return None
    types = (inputs["input_ids"] == model.config.image_token_id).int()
    positions, _ = model.get_rope_index(inputs["input_ids"], types, inputs["image_grid_thw"])
    result: NDArray[np.int32] = positions[:, 0].numpy().astype(np.int32)
    return result
