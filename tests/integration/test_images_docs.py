"""The examples of docs/images.md, as they stand there but for the server's address, against a tiny seeded Gemma 3 that
sees, with transformers' own classes. No example goes without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.integration.real_server import RealServer
from tests.integration.test_docs import blocks, run_python, run_shell, source, until_end
from tests.server.harness import ROOT
from tests.vision_models import PLACEHOLDER, VisionFamily, generate, picture, processed, vision_processor

PAGE = (ROOT / "docs" / "images.md").read_text()
CURL = ("sh", "curl")
OPENAI = ("python", "OpenAI")
MIXED = ("python", "token_embeddings")
TOKENS = 64
WIDTH, HEIGHT = 60, 45


@pytest.fixture(scope="module")
def model(tiny_vision_model: Callable[[VisionFamily], Path]) -> Path:
    return tiny_vision_model("gemma3")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with RealServer(tmp_path_factory.mktemp("images"), model, dtype="float32", debug_checks=True) as server:
        yield server.wait_ready()


def expected(model: Path, text: str, shown: Image.Image) -> str | None:
    """By transformers, to what its processor makes of text and image; None where a near tie makes it a matter of
    rounding."""
    tokens = generate(model, processed(model, text, [shown]), TOKENS)
    return None if tokens is None else until_end(model, tokens)


@pytest.fixture
def shown(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Image.Image:
    """picture.png where the reader stands: the first whose answers are no matter of rounding."""
    monkeypatch.chdir(tmp_path)
    for seed in range(50):
        candidate = picture(seed, WIDTH, HEIGHT)
        if all(expected(model, text, candidate) for text in (chat_text(model), MIXED_TEXT)):
            candidate.save(tmp_path / "picture.png")
            return candidate
    raise AssertionError("no usable picture in fifty")


MIXED_TEXT = f"Look: {PLACEHOLDER['gemma3']} of colour and grain"


def chat_text(model: Path) -> str:
    content = [{"type": "text", "text": "What is this?"}, {"type": "image"}]
    chat = [{"role": "user", "content": content}]
    text: str = vision_processor(model).apply_chat_template(chat, add_generation_prompt=True)
    return text


def test_every_example_is_here() -> None:
    found = [[mark for language, mark in (CURL, OPENAI, MIXED) if kind == language and mark in text]
             for kind, text in blocks(PAGE)]  # fmt: skip
    assert found == [["curl"], ["OpenAI"], ["token_embeddings"]]


def test_chat(server: RealServer, model: Path, shown: Image.Image, tmp_path: Path) -> None:
    answer = expected(model, chat_text(model), shown)
    body = run_shell(source(PAGE, CURL, server), tmp_path)
    assert body["choices"][0]["message"]["content"] == answer
    assert run_python(source(PAGE, OPENAI, server), tmp_path)[0] == f"{answer}\n"


def test_text_image_and_embeddings(server: RealServer, model: Path, shown: Image.Image, tmp_path: Path) -> None:
    out, variables = run_python(source(PAGE, MIXED, server), tmp_path)
    variables["server"].close()
    assert out == f"{expected(model, MIXED_TEXT, shown)}\n"
