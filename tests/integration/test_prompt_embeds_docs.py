"""The examples of docs/prompt_embeds.md, as they stand there but for the server's address and the model's folder."""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.integration.real_server import RealServer
from tests.models import hf_generate
from tests.server.harness import ROOT

PAGE = (ROOT / "docs" / "prompt_embeds.md").read_text()
TOKENS = 24


def example(language: str, word: str, server: RealServer, model: Path) -> str:
    """The page's one block in this language that has `word` in it."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (block,) = [block for block in blocks if word in block]
    for there, here in (
        ("http://127.0.0.1:8000", server.base),
        ("path/to/model", str(model)),
        ("python rows.py", f"{sys.executable} rows.py"),
        ("python -c", f"{sys.executable} -c"),
    ):
        block = block.replace(there, here)
    return str(block)


def run_here(source: str, folder: Path) -> str:
    """What a Python example prints. In this process, which has imported the large libraries already."""
    (folder / "example.py").write_text(source)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        runpy.run_path(str(folder / "example.py"))
    return out.getvalue()


def reference(model: Path, *pieces: str) -> str:
    """Of the pieces' tokens, by transformers."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
    return str(tokenizer.decode(hf_generate(model, ids, TOKENS, ignore_eos=False), skip_special_tokens=True))


@pytest.fixture
def folder(server: RealServer, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rows.py").write_text(example("python", "def embedding", server, llama))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "rows", raising=False)
    return tmp_path


@pytest.mark.parametrize("words", [["@body.json"], ["-F rows=", "/v1/prompt_embeds"]])
def test_curl(server: RealServer, llama: Path, folder: Path, words: list[str]) -> None:
    for word in words:
        command = ["bash", "-c", example("sh", word, server, llama)]
        done = subprocess.run(command, cwd=folder, capture_output=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)["choices"][0]["text"]
        assert answer == reference(llama, "What is the", " capital of France", "?")


def test_openai_client(server: RealServer, llama: Path, folder: Path) -> None:
    out = run_here(example("python", "client.completions", server, llama), folder)
    assert out == reference(llama, "What is the", " capital of France", "?") + "\n"


def test_chat(server: RealServer, llama: Path, folder: Path) -> None:
    out = run_here(example("python", "client.chat", server, llama), folder)
    before, after = "<bos><turn>user\nWhat is the", "?<eos>\n<turn>assistant\n"
    assert out == reference(llama, before, " capital of France", after) + "\n"


def test_our_client(server: RealServer, llama: Path, folder: Path) -> None:
    """The same answer twice, whole and streamed."""
    out = run_here(example("python", "server.client", server, llama), folder)
    expected = reference(llama, "What is the", " capital of France", "?")
    assert out == f"{expected}\n{expected}"
