"""The examples of docs/rows_out.md, as they stand there but for the server's address."""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import pytest
import torch
from transformers import AutoTokenizer

from tests.integration.real_server import RealServer
from tests.models import embed, hf_generate, hf_hidden
from tests.server.harness import ROOT

PAGE = (ROOT / "docs" / "rows_out.md").read_text()
PROMPT = "The capital of France is"


def example(language: str, word: str, server: RealServer) -> str:
    """The page's one block in this language that has `word` in it."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (block,) = [block for block in blocks if word in block]
    return str(block).replace("http://127.0.0.1:8000", server.base)


def run_here(source: str, folder: Path) -> str:
    """What a Python example prints. In this process, which has imported the large libraries already."""
    (folder / "example.py").write_text(source)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        for value in runpy.run_path(str(folder / "example.py")).values():
            if isinstance(value, openai.OpenAI | httpx.Client):
                value.close()
    return out.getvalue()


def prompt_ids(model: Path) -> list[int]:
    ids: list[int] = AutoTokenizer.from_pretrained(model)(PROMPT)["input_ids"]
    return ids


def text_of(model: Path, tokens: list[int]) -> str:
    return str(AutoTokenizer.from_pretrained(model).decode(tokens, skip_special_tokens=True))


def test_input_rows_with_curl(server: RealServer, llama: Path, tmp_path: Path) -> None:
    source = example("sh", "token_embeddings", server).replace("python -c", f"{sys.executable} -c")
    done = subprocess.run(["bash", "-c", source], cwd=tmp_path, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    expected = text_of(llama, hf_generate(llama, prompt_ids(llama), 24, ignore_eos=False))
    assert json.loads(done.stdout)["choices"][0]["text"] == expected


def test_closing_the_loop(server: RealServer, llama: Path, tmp_path: Path) -> None:
    rows = embed(llama, prompt_ids(llama))
    for _ in range(4):
        rows = torch.cat([rows, hf_hidden(llama, rows)[-1:]])
    expected = text_of(llama, hf_generate(llama, rows, 8, ignore_eos=False))
    assert run_here(example("python", "return_hidden_states", server), tmp_path) == expected + "\n"


def test_embeddings_with_the_openai_package(server: RealServer, llama: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(llama)
    texts = ("The capital of France is Paris.", "Paris is in France.")
    one, other = (hf_hidden(llama, tokenizer(text)["input_ids"]).mean(0) for text in texts)
    found = float(run_here(example("python", "embeddings.create", server), tmp_path))
    assert found == pytest.approx(float(torch.cosine_similarity(one, other, dim=0)), abs=1e-5)
