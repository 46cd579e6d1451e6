"""A model's own way from an image to rows: its vision tower and projector, behind `get_image_features`.

Built by `runner.model` from a loaded transformers model, called by `runner.image_encoder`. Which models are known, and
how their images sit in a prompt, is in `FAMILIES`; all others take text only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from runner.messages import VisionInfo


@dataclass(frozen=True)
class Family:
    two_way: bool = False
    """The rows of an image attend to each other in both directions."""
    mrope: bool = False
    """Images of any size, as a grid of patches, and rows with positions in three dimensions."""


FAMILIES = {
    "gemma3": Family(two_way=True),
    "llava": Family(),
    "qwen2_vl": Family(mrope=True),
    "qwen2_5_vl": Family(mrope=True),
}
"""By transformers' model type."""

MAX_ROWS = 16_384
"""Of an image, where that depends on its size: what Qwen2-VL's own processor makes at most."""


class Vision:
    """What encodes images. `info.max_rows` is set once the step's size is known (`Engine`)."""

    def __init__(self, hf: PreTrainedModel, family: Family) -> None:
        self._body: Any = hf.base_model
        self._weight = cast(Tensor, hf.get_input_embeddings().weight)
        config = hf.config
        self.info = _info(config, family)

    @staticmethod
    def of(hf: PreTrainedModel) -> Vision | None:
        family = FAMILIES.get(hf.config.model_type)
        if family is None or not hasattr(hf.config, "vision_config"):
            return None
        return Vision(hf, family)

    def drop_text_model(self) -> None:
        """Lets go of the text model beside the tower, which has been rewritten (`runner.fusion`)."""
        if isinstance(getattr(self._body, "language_model", None), nn.Module):
            self._body.language_model = None

    @torch.inference_mode()
    def encode(self, pixels: Tensor, grid: tuple[int, ...]) -> Tensor:
        """The rows of one image: [rows, hidden], model dtype, device.

        Args:
            pixels: what the image processor made of it, float32, host. grid: patches in time, height and width, if
                the family has them.
        """
        weight = self._weight
        pixels = pixels.to(weight.device, non_blocking=True).to(weight.dtype)
        options = {"image_grid_thw": torch.tensor([grid], device=weight.device)} if grid else {}
        features = self._body.get_image_features(pixel_values=pixels, return_dict=True, **options).pooler_output
        rows = features.flatten(0, 1) if isinstance(features, Tensor) and features.dim() == 3 else features
        return (rows if isinstance(rows, Tensor) else torch.cat(list(rows))).to(weight.dtype)

    def encode_largest(self, max_model_len: int) -> None:
        """An image as large as `encode` may be given, all zeros: to see what memory that takes."""
        info = self.info
        if not info.mrope:
            self.encode(torch.zeros(info.pixel_shape), ())
            return
        side = max(int(min(max_model_len, MAX_ROWS) ** 0.5), 1) * info.merge_size
        self.encode(torch.zeros(side * side, info.pixel_shape[1]), (1, side, side))


def _info(config: PretrainedConfig, family: Family) -> VisionInfo:
    vision = config.vision_config
    name, token = str(config.model_type), int(config.image_token_id)
    if family.mrope:
        channels = int(getattr(vision, "in_channels", None) or getattr(vision, "in_chans", None) or 3)
        width = channels * int(vision.temporal_patch_size) * int(vision.patch_size) ** 2
        merge = int(vision.spatial_merge_size)
        return VisionInfo(name, token, mrope=True, merge_size=merge, pixel_shape=(0, width))
    side = int(vision.image_size)
    shape = (1, int(getattr(vision, "num_channels", 3)), side, side)
    if family.two_way:
        rows = int(config.mm_tokens_per_image)
        return VisionInfo(name, token, two_way=True, pixel_shape=shape, image_rows=rows)
    rows = (side // int(vision.patch_size)) ** 2
    if vision.model_type == "clip_vision_model" and config.vision_feature_select_strategy == "full":
        rows += 1  # CLIP's class row; the other strategy drops it
    return VisionInfo(name, token, pixel_shape=shape, image_rows=rows)
