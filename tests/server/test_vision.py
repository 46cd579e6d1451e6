"""Image processors without torch make what transformers' own processors make."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from runner.messages import VisionInfo
from server.image_file import ImageError
from server.vision import TooManyImageRows, Vision
from tests.server.harness import ROOT
from tests.vision_models import FIXED_ROWS, VISION_FAMILIES, VisionFamily, picture, vision_model, vision_processor

# Prints the digest of each image's pixels, its rows and its grid, for every folder.
PROGRAM = """
import hashlib, json, sys
from pathlib import Path
from server.no_torch import keep_torch_out
keep_torch_out()
import msgspec
from PIL import Image
from runner.messages import VisionInfo
from server.tokenizer import Tokenizer
from server.vision import Vision
found = []
for folder, info in json.loads(sys.argv[1]):
    vision = Vision.load(Path(folder), msgspec.convert(info, VisionInfo), Tokenizer.load(Path(folder)))
    made = [vision.prepare(Image.open(path), 1000) for path in sys.argv[2:]]
    found.append([[hashlib.sha256(each.pixels.tobytes()).hexdigest(), each.num_rows, list(each.grid)] for each in made])
    vision.close()
assert not [name for name in sys.modules if name.startswith("torch.")]
print(json.dumps(found))
"""

INFOS = {
    "gemma3": VisionInfo("gemma3", 6, True, False, 1, (1, 3, 48, 48), FIXED_ROWS, FIXED_ROWS),
    "llava": VisionInfo("llava", 4, False, False, 1, (1, 3, 42, 42), FIXED_ROWS, FIXED_ROWS),
    "qwen2_vl": VisionInfo("qwen2_vl", 6, False, True, 2, (0, 384), 0, 512),
}


def test_the_same_pixels(tiny_vision_model: Callable[[VisionFamily], Path], tmp_path: Path) -> None:
    import hashlib

    sizes = [(50, 40), (200, 31), (17, 120), (300, 280)]
    paths = [tmp_path / f"{index}.png" for index in range(len(sizes))]
    for index, (path, size) in enumerate(zip(paths, sizes, strict=True)):
        picture(index, *size).save(path)
    import msgspec

    arguments = json.dumps([(str(tiny_vision_model(f)), msgspec.to_builtins(INFOS[f])) for f in VISION_FAMILIES])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROGRAM, arguments, *map(str, paths)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ran.returncode == 0, ran.stderr
    for family, found in zip(VISION_FAMILIES, json.loads(ran.stdout), strict=True):
        path = tiny_vision_model(family)
        for index, (size, (digest, rows, grid)) in enumerate(zip(sizes, found, strict=True)):
            inputs = vision_processor(path).image_processor(images=[picture(index, *size)], return_tensors="np")
            assert hashlib.sha256(np.asarray(inputs["pixel_values"]).tobytes()).hexdigest() == digest
            assert grid == (inputs["image_grid_thw"][0].tolist() if family == "qwen2_vl" else [])
            assert rows == (int(np.prod(grid)) // 4 if grid else FIXED_ROWS)


def load(path: Path, info: VisionInfo) -> Vision | None:
    from server.tokenizer import Tokenizer

    return Vision.load(path, info, Tokenizer.load(path))


def test_of_a_large_image_only_the_size_is_looked_at(
    tiny_vision_model: Callable[[VisionFamily], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    vision = load(tiny_vision_model("qwen2_vl"), INFOS["qwen2_vl"])
    assert vision is not None
    monkeypatch.setattr(vision, "_processor", Sizes(vision._processor))
    with pytest.raises(TooManyImageRows, match="takes 16 tokens, and there is room for 15"):
        vision.prepare(picture(1, 400, 400), 15)
    vision.close()


class Sizes:
    def __init__(self, processor: object) -> None:
        self.get_number_of_image_patches = processor.get_number_of_image_patches  # type: ignore[attr-defined]


def test_shapes_that_a_processor_refuses(tiny_vision_model: Callable[[VisionFamily], Path]) -> None:
    vision = load(tiny_vision_model("qwen2_vl"), INFOS["qwen2_vl"])
    assert vision is not None
    with pytest.raises(ImageError, match="a shape that this model does not take"):
        vision.prepare(picture(1, 401, 2), 400)
    vision.close()


@pytest.mark.parametrize("change", ["pixel_shape", "files"])
def test_a_processor_that_does_not_fit_means_no_images(
    change: str, tiny_vision_model: Callable[[VisionFamily], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The server serves text then, and says so."""
    path, info = tiny_vision_model("gemma3"), INFOS["gemma3"]
    if change == "files":
        for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
            (tmp_path / name).write_bytes((path / name).read_bytes())
        path = tmp_path
    else:
        info = VisionInfo("gemma3", 6, True, False, 1, (1, 3, 56, 56), FIXED_ROWS, FIXED_ROWS)
    assert load(path, info) is None
    assert "no images can be taken" in caplog.text


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_what_this_page_says_of_the_models(
    family: VisionFamily, tiny_vision_model: Callable[[VisionFamily], Path]
) -> None:
    """`INFOS` is what the runner says."""
    assert INFOS[family].image_token_id == vision_model(tiny_vision_model(family)).config.image_token_id
