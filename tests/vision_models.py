"""Tiny seeded models that see, with their processors, and the reference for prompts with images: transformers' own
`generate` on what the processor makes of text and images.

`build_vision_model(family, folder)` saves a Hugging Face folder as `models.build_tiny_model` does. An image must matter
to what the model says, so the tower gets larger weights than usual; the tests hold it to that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3Processor,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    SiglipVisionConfig,
)
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.models import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    SLIDING_WINDOW,
    TIE,
    _initialise,
    _shared,
    build_tokenizer,
)

VisionFamily = Literal["gemma3", "llava", "qwen2_vl", "qwen2_5_vl"]
VISION_FAMILIES: tuple[VisionFamily, ...] = ("gemma3", "llava", "qwen2_vl")
"""What most tests run on: to Qwen2-VL the last one is like the first, but for its tower."""

FIXED_ROWS = 9
"""Of an image, where that doesn't depend on its size: more than the window, so that both of Gemma's masks matter."""
_SIDE = 48

_TURNS = "{{ bos_token }}{% for message in messages %}<turn>{{ message['role'] }}\n"
_END = "<eos>\n{% endfor %}{% if add_generation_prompt %}<turn>assistant\n{% endif %}"


def _template(image: str) -> str:
    content = (
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] %}"
        f"{{% if item['type'] == 'image' %}}{{{{ {image!r} }}}}{{% else %}}{{{{ item['text'] }}}}{{% endif %}}"
        "{% endfor %}{% endif %}"
    )
    return _TURNS + content + _END


_QWEN_SPECIAL = {
    "vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>",
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>",
}  # fmt: skip
_SPECIAL = {
    "gemma3": {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
    "llava": {"image_token": "<image>"},
    "qwen2_vl": _QWEN_SPECIAL,
    "qwen2_5_vl": _QWEN_SPECIAL,
}
PLACEHOLDER = {
    "gemma3": "<start_of_image>",
    "llava": "<image>",
    "qwen2_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
}
"""What stands for an image in a text that the processor takes."""


@torch.no_grad()
def _sharpen(model: torch.nn.Module) -> None:
    """So that what an image shows reaches the rows that it becomes, at the size of the text's own."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in sorted(model.named_parameters()):
        if "mm_input_projection" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 2 / math.sqrt(parameter.shape[0]))
        elif ("vision_tower" in name or "visual" in name) and ("norm" in name or "ln" in name):
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        elif "mm_soft_emb_norm" in name:
            parameter.fill_(0.0)


def build_vision_model(family: VisionFamily, folder: Path) -> Path:
    """Save the family's tiny model (fp32), its generation config and its processor in `folder`; returns it."""
    tokenizer = build_tokenizer(_SPECIAL[family])
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in _SPECIAL[family].items()}
    build = {"gemma3": _gemma3, "llava": _llava, "qwen2_vl": _qwen2_vl, "qwen2_5_vl": _qwen2_5_vl}[family]
    model, processor = build(tokenizer, ids)
    _initialise(model, 0)
    _sharpen(model)
    model.generation_config = GenerationConfig(pad_token_id=PAD_ID, bos_token_id=BOS_ID, eos_token_id=EOS_ID)
    model.save_pretrained(folder)
    processor.chat_template = tokenizer.chat_template = _template(PLACEHOLDER[family])
    processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _gemma3(tokenizer: Any, ids: dict[str, int]) -> tuple[Any, Any]:
    layers = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    text = _shared(
        num_hidden_layers=4, layer_types=layers, sliding_window=SLIDING_WINDOW, head_dim=32, query_pre_attn_scalar=32
    )
    vision = SiglipVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=_SIDE,
        patch_size=8, vision_use_head=False,
    )  # fmt: skip
    config = Gemma3Config(
        text_config=text, vision_config=vision.to_dict(), mm_tokens_per_image=FIXED_ROWS,
        image_token_id=ids["image_token"], boi_token_index=ids["boi_token"], eoi_token_index=ids["eoi_token"],
        tie_word_embeddings=False,
    )  # fmt: skip
    images = Gemma3ImageProcessorPil(size={"height": _SIDE, "width": _SIDE})
    return Gemma3ForConditionalGeneration(config), Gemma3Processor(images, tokenizer, image_seq_length=FIXED_ROWS)


def _llava(tokenizer: Any, ids: dict[str, int]) -> tuple[Any, Any]:
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2, image_size=42, patch_size=14
    )
    text = LlamaConfig(**_shared(num_hidden_layers=2, head_dim=16))
    config = LlavaConfig(
        text_config=text.to_dict(), vision_config=vision.to_dict(), image_token_id=ids["image_token"],
        image_seq_length=FIXED_ROWS, tie_word_embeddings=False,
    )  # fmt: skip
    images = CLIPImageProcessorPil(size={"shortest_edge": 42}, crop_size={"height": 42, "width": 42})
    processor = LlavaProcessor(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        image_token="<image>",
    )  # fmt: skip
    return LlavaForConditionalGeneration(config), processor


def _qwen2_vl(tokenizer: Any, ids: dict[str, int]) -> tuple[Any, Any]:
    vision = {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    return Qwen2VLForConditionalGeneration(_qwen_config(Qwen2VLConfig, vision, ids)), _qwen_processor(tokenizer)


def _qwen2_5_vl(tokenizer: Any, ids: dict[str, int]) -> tuple[Any, Any]:
    vision = {
        "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 48, "window_size": 32,
        "fullatt_block_indexes": [1],
    }  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(_qwen_config(Qwen2_5_VLConfig, vision, ids)), _qwen_processor(tokenizer)


def _qwen_config(kind: Any, vision: dict[str, Any], ids: dict[str, int]) -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    patches = {"patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}
    return kind(
        text_config=_shared(num_hidden_layers=3, rope_parameters=rope),
        vision_config={"depth": 2, "num_heads": 2, **patches, **vision},
        image_token_id=ids["image_token"], video_token_id=ids["video_token"],
        vision_start_token_id=ids["vision_start_token"], vision_end_token_id=ids["vision_end_token"],
        tie_word_embeddings=False,
    )  # fmt: skip


def _qwen_processor(tokenizer: Any) -> QwenProcessor:
    images = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 4 * 16 * 16, "longest_edge": 24 * 16 * 16}, patch_size=8, merge_size=2
    )
    return QwenProcessor(images, tokenizer)


class QwenProcessor:
    """What transformers' Qwen2VLProcessor does, but for videos: those of its parts need torchvision."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_processor, self.tokenizer = image_processor, tokenizer
        self.chat_template = tokenizer.chat_template

    def save_pretrained(self, folder: Path) -> None:
        self.image_processor.save_pretrained(folder)

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        text: str = self.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        return text

    def __call__(self, text: str, images: Sequence[Image.Image] | None, return_tensors: str) -> dict[str, Any]:
        inputs: dict[str, Any] = {}
        if images:
            inputs |= self.image_processor(images=list(images), return_tensors=return_tensors)
        pieces = text.split("<|image_pad|>")
        grids = inputs.get("image_grid_thw", torch.zeros(0, 3))
        assert len(pieces) == len(grids) + 1
        pads = ["<|image_pad|>" * (int(grid.prod()) // self.image_processor.merge_size**2) for grid in grids]
        whole = "".join(piece + pad for piece, pad in zip(pieces, [*pads, ""], strict=True))
        inputs |= self.tokenizer(whole, return_tensors=return_tensors)
        inputs.pop("token_type_ids", None)
        if images:
            image_id = self.tokenizer.convert_tokens_to_ids("<|image_pad|>")
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == image_id).int()
        return inputs


@functools.lru_cache(maxsize=4)
def vision_model(path: Path) -> Any:
    """The folder's model in plain eager transformers, fp32. Loaded once; never change it."""
    return AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def picture(seed: int, width: int = 50, height: int = 40) -> Image.Image:
    """Large coloured fields: no two seeds look alike, at any size."""
    fields = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    return Image.fromarray(fields).resize((width, height), Image.Resampling.NEAREST)


def fresh_model(path: Path) -> Any:
    """Qwen's keeps the offset of the last prompt with images, and gives it to a text after it."""
    model = vision_model(path)
    if hasattr(model.model, "rope_deltas"):
        model.model.rope_deltas = None
    return model


@functools.lru_cache(maxsize=4)
def vision_processor(path: Path) -> Any:
    if AutoConfig.from_pretrained(path).model_type in ("qwen2_vl", "qwen2_5_vl"):
        return QwenProcessor(AutoImageProcessor.from_pretrained(path), AutoTokenizer.from_pretrained(path))
    return AutoProcessor.from_pretrained(path)


def processed(path: Path, text: str, images: Sequence[Image.Image]) -> Any:
    """What the processor makes of a text with a placeholder for each image: tensors by name, a batch of one."""
    return vision_processor(path)(text=text, images=list(images) or None, return_tensors="pt")


@torch.inference_mode()
def generate(path: Path, inputs: Any, max_new_tokens: int) -> list[int] | None:
    """Greedy tokens after the processor's inputs; None where a near tie makes them a matter of rounding."""
    output = fresh_model(path).generate(
        **inputs, do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=None, pad_token_id=PAD_ID,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    best = torch.cat(output.logits).topk(2).values
    length = inputs["input_ids"].shape[1]
    return output.sequences[0, length:].tolist() if (best[:, 0] - best[:, 1]).min() > TIE else None
