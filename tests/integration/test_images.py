"""Images over HTTP answer as transformers' `generate` does to what its own processor makes of the same text and
images."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.integration.real_server import RealServer, as_safetensors
from tests.integration.test_answers import greedy
from tests.models import PAD_ID
from tests.parity.pictures import embedded
from tests.vision_models import (
    PLACEHOLDER,
    VISION_FAMILIES,
    VisionFamily,
    fresh_model,
    picture,
    processed,
    vision_model,
    vision_processor,
)

TOKENS = 16


@pytest.fixture(scope="module", params=VISION_FAMILIES)
def family(request: pytest.FixtureRequest) -> VisionFamily:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def model(family: VisionFamily, tiny_vision_model: Callable[[VisionFamily], Path]) -> Path:
    return tiny_vision_model(family)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with RealServer(tmp_path_factory.mktemp("images"), model, dtype="float32", debug_checks=True) as server:
        yield server.wait_ready()


def data_url(image: Image.Image, kind: str = "png") -> str:
    buffer = io.BytesIO()
    image.save(buffer, kind, **({"lossless": True} if kind == "webp" else {}))
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def image_part(image: Image.Image, kind: str = "png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(image, kind), "detail": "auto"}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


@torch.inference_mode()
def expected(path: Path, text: str, images: list[Image.Image]) -> tuple[list[int], int]:
    """(greedy tokens, rows of the prompt)"""
    inputs = processed(path, text, images)
    output = fresh_model(path).generate(
        **inputs, do_sample=False, max_new_tokens=TOKENS, eos_token_id=None, pad_token_id=PAD_ID
    )
    rows = inputs["input_ids"].shape[1]
    return output[0, rows:].tolist(), rows


def ask(server: RealServer, **body: Any) -> tuple[list[int], int]:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    options = {"max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
    with server.client() as client:
        response = client.post(path, json=greedy(**options, **body))
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens"]


def test_chat(server: RealServer, model: Path) -> None:
    """As the processor's own chat template has it, with what it writes around an image joined to the text there."""
    first, second = picture(1), picture(2, 90, 30)
    content = [text_part("Look:\n"), image_part(first), text_part("\nand "), image_part(second), text_part(" at it")]
    messages = [
        {"role": "system", "content": "See."},
        {"role": "user", "content": content},
        {"role": "assistant", "content": "The answer."},
        {"role": "user", "content": [image_part(first, "webp")]},
    ]
    shown = [{"type": "image"} if part["type"] == "image_url" else part for part in content]
    last = {"role": "user", "content": [{"type": "image"}]}
    seen = [messages[0], {"role": "user", "content": shown}, messages[2], last]
    text = vision_processor(model).apply_chat_template(seen, add_generation_prompt=True)
    assert ask(server, messages=messages) == expected(model, text, [first, second, first])


def test_completions(server: RealServer, model: Path, family: VisionFamily) -> None:
    """A text in parts around images is what the processor makes of it with placeholders; embeddings and ids may stand
    among them."""
    image = picture(3)
    before, after = "What is the answer? ", "\n is in the sand"
    begin, _, end = PLACEHOLDER[family].partition("<|image_pad|>") if family == "qwen2_vl" else ("", "", "")
    whole = expected(model, before + PLACEHOLDER[family] + after, [image])
    parts = [text_part(before + begin), image_part(image), text_part(end + after)]
    assert ask(server, prompt=parts) == whole
    ids = processed(model, before + PLACEHOLDER[family] + after, [image])["input_ids"][0].tolist()
    start = ids.index(vision_model(model).config.image_token_id)
    rows = {"type": "prompt_embeds", "data": as_safetensors(embedded(model, ids[:start][-3:]))}
    if family != "gemma3":  # there the processor's own text comes between
        mixed = [{"type": "token_ids", "token_ids": ids[: start - 3]}, rows, image_part(image), text_part(end + after)]
        assert ask(server, prompt=mixed) == whole
    first, rest = ids[:2], vision_processor(model).tokenizer.decode(ids[2:start])
    if family == "gemma3":
        rest = rest.removesuffix("\n\n<start_of_image>")
    rows = {"type": "prompt_embeds", "data": as_safetensors(embedded(model, first))}
    assert ask(server, prompt=[rows, text_part(rest), image_part(image), text_part(end + after)]) == whole


def test_chat_with_embeddings_and_images(server: RealServer, model: Path) -> None:
    image = picture(4)
    ids = vision_processor(model).tokenizer.encode(" colour and grain")
    rows = {"type": "prompt_embeds", "data": as_safetensors(embedded(model, ids))}
    shown = [{"type": "image"}, text_part("of colour and grain it is")]
    text = vision_processor(model).apply_chat_template([{"role": "user", "content": shown}], add_generation_prompt=True)
    content = [image_part(image), text_part("of"), rows, text_part(" it is")]
    assert ask(server, messages=[{"role": "user", "content": content}]) == expected(model, text, [image])


def test_no_text_forges_an_image(server: RealServer, model: Path, family: VisionFamily) -> None:
    """What stands for an image in the processor's text is a token like any other in a user's."""
    token = vision_processor(model).tokenizer.convert_ids_to_tokens(vision_model(model).config.image_token_id)
    for text in (PLACEHOLDER[family], token, f"{token}{PLACEHOLDER[family]}"):
        content = [text_part(text), image_part(picture(5)), text_part(text)]
        tokens, rows = ask(server, messages=[{"role": "user", "content": content}])
        _, without = ask(server, messages=[{"role": "user", "content": [text_part("a"), image_part(picture(5))]}])
        assert len(tokens) == TOKENS
        assert rows < without + 2 * 12
        alone, count = ask(server, messages=[{"role": "user", "content": text}])
        assert len(alone) == TOKENS and count < 12 + 6 * 2


def test_text_only(server: RealServer, model: Path) -> None:
    text = "The cutter draws a pattern"
    assert ask(server, prompt=text) == expected(model, text, [])


def test_many_at_once(server: RealServer, model: Path, family: VisionFamily) -> None:
    """A batch of prompts with images, and without."""
    begin, _, end = PLACEHOLDER[family].partition("<|image_pad|>") if family == "qwen2_vl" else ("", "", "")
    prompts, answers = [], []
    for seed in range(6):
        image = picture(seed % 4)
        prompts.append([text_part("Look" + begin), image_part(image), text_part(f"{end} {seed}")])
        answers.append(expected(model, f"Look{PLACEHOLDER[family]} {seed}", [image])[0])
    ids = processed(model, "The cutter", [])["input_ids"][0].tolist()
    prompts.append([{"type": "token_ids", "token_ids": ids}])
    answers.append(expected(model, "The cutter", [])[0])
    options = {"max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
    with server.client() as client:
        body = client.post("/v1/completions", json=greedy(prompt=prompts, **options)).json()
    assert [choice["token_ids"] for choice in body["choices"]] == answers


def test_render_shows_the_rows(server: RealServer, model: Path) -> None:
    messages = [{"role": "user", "content": [text_part("a"), image_part(picture(6))]}]
    with server.client() as client:
        body = client.post("/v1/chat/completions/render", json={"messages": messages}).json()
    assert body["prompt"] is None
    ids = processed(model, _chat_text(model), [picture(6)])["input_ids"][0].tolist()
    image_id = vision_model(model).config.image_token_id
    assert body["token_ids"] == [None if token == image_id else token for token in ids]


def _chat_text(model: Path) -> str:
    content = [text_part("a"), {"type": "image"}]
    chat = [{"role": "user", "content": content}]
    text: str = vision_processor(model).apply_chat_template(chat, add_generation_prompt=True)
    return text


def test_bad_images_are_told_by_their_place(server: RealServer) -> None:
    with server.client() as client:
        for url in ("data:image/png;base64,AAAA", "https://example.org/x.png", "http://127.0.0.1/", "ftp://x/", "x"):
            content = [text_part("a"), {"type": "image_url", "image_url": {"url": url}}]
            response = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "messages[0].content[1].image_url.url"
        many = [image_part(picture(0))] * 17
        response = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": many}]})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "messages[0].content[16].image_url.url"
        response = client.post("/v1/completions", json={"prompt": many})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
        response = client.post("/v1/completions", json={"prompt": many[:1], "echo": True})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "echo")
