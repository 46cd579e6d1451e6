"""/v1/embeddings with the openai package, against the hidden states of plain transformers."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from openai.types import CreateEmbeddingResponse
from torch import Tensor
from transformers import AutoTokenizer

from tests.integration.real_server import RealServer, as_safetensors
from tests.models import HIDDEN_SIZE, MAX_POSITIONS, embed, hf_generate, hf_hidden, random_prompt
from tests.server.harness import eventually

TEXTS = ["What is the capital of France?", "Paris.", "The cutter draws a pattern, " * 12, "é"]


@pytest.fixture
def client(server: RealServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0) as client:
        yield client


def ids_of(path: Path, text: str) -> list[int]:
    ids: list[int] = AutoTokenizer.from_pretrained(path)(text)["input_ids"]
    return ids


def reference(path: Path, ids: list[int] | Tensor, pooling: str = "mean", *, normalize: bool = True) -> Tensor:
    hidden = hf_hidden(path, ids)
    row = hidden.mean(0) if pooling == "mean" else hidden[-1]
    return row / row.norm() if normalize else row


def assert_close(found: list[float], expected: Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("encoding", [None, "float", "base64"])
def test_texts_with_the_openai_package(client: openai.OpenAI, llama: Path, encoding: Any) -> None:
    """It asks for base64 unless told otherwise."""
    options = {} if encoding is None else {"encoding_format": encoding}
    answer = client.embeddings.create(model="m", input=TEXTS, **options)
    assert isinstance(answer, CreateEmbeddingResponse)
    assert [each.index for each in answer.data] == [0, 1, 2, 3]
    total = 0
    for text, each in zip(TEXTS, answer.data, strict=True):
        ids = ids_of(llama, text)
        total += len(ids)
        found: Any = each.embedding
        if encoding == "base64":  # as it came: the package decodes only what it has asked for by itself
            found = np.frombuffer(base64.b64decode(found), "<f4").tolist()
        assert_close(found, reference(llama, ids))
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (total, total)
    assert (answer.model, answer.object, answer.data[0].object) == ("m", "list", "embedding")


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("normalize", [True, False])
def test_every_kind_of_input(server: RealServer, llama: Path, pooling: str, normalize: bool) -> None:
    """One text, one list of ids, many, and parts with embeddings; the same twice, the second time cached."""
    ids, more = random_prompt(37, 5), random_prompt(70, 6)
    rows = embed(llama, ids)
    mixed = [
        {"type": "token_ids", "token_ids": ids[:5]},
        {"type": "prompt_embeds", "data": as_safetensors(rows[5:30])},
        {"type": "token_ids", "token_ids": ids[30:]},
    ]
    options = {"model": "m", "pooling": pooling, "normalize": normalize}
    with server.client() as client:

        def ask(value: Any) -> list[list[float]]:
            response = client.post("/v1/embeddings", json={**options, "input": value})
            assert response.status_code == 200, response.text
            return [each["embedding"] for each in response.json()["data"]]

        for value, prompts in (
            (TEXTS[0], [ids_of(llama, TEXTS[0])]),
            (ids, [ids]),
            ([ids, more], [ids, more]),
            (mixed, [ids]),
            ([mixed, more, TEXTS[1], mixed], [ids, more, ids_of(llama, TEXTS[1]), ids]),
        ):
            for found in (ask(value), ask(value)):
                assert len(found) == len(prompts)
                for each, prompt in zip(found, prompts, strict=True):
                    assert_close(each, reference(llama, prompt, pooling, normalize=normalize))


@pytest.mark.parametrize("encoding", ["float", "base64"])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_what_overflows_in_the_model_has_no_embedding(server: RealServer, pooling: str, encoding: str) -> None:
    """JSON has no NaN: there would be nulls in the place of numbers."""
    sent = [{"type": "prompt_embeds", "data": as_safetensors(torch.full((3, HIDDEN_SIZE), 3e38))}]
    with server.client() as client:
        body = {"input": [[5, 6], sent], "pooling": pooling, "encoding_format": encoding}
        response = client.post("/v1/embeddings", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "input"), response.text
        assert client.post("/v1/embeddings", json={**body, "input": [[5, 6]]}).status_code == 200


def test_a_hundred_among_answers(server: RealServer, llama: Path) -> None:
    """More than run at once, of all lengths, in chunks, while others generate; nothing is left behind."""
    prompts = [random_prompt(1 + 7 * number % 140, number) for number in range(100)]
    generated = random_prompt(20, 3)

    async def both() -> tuple[Any, Any]:
        async with openai.AsyncOpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(
                client.embeddings.create(model="m", input=prompts),
                client.completions.create(
                    model="m", prompt=generated, max_tokens=40, temperature=0,
                    extra_body={"ignore_eos": True, "return_token_ids": True},
                ),
            )  # fmt: skip

    embeddings, completion = asyncio.run(both())
    for prompt, each in zip(prompts, embeddings.data, strict=True):
        assert_close(each.embedding, reference(llama, prompt))
    assert completion.choices[0].token_ids == hf_generate(llama, generated, 40)
    eventually(server.is_idle)


def test_truncation(server: RealServer, llama: Path) -> None:
    """The beginning stays, unless told otherwise."""
    ids = random_prompt(50, 1)
    with server.client() as client:
        for options, kept in (
            ({"truncate_prompt_tokens": 7}, ids[:7]),
            ({"truncate_prompt_tokens": 7, "truncation_side": "left"}, ids[-7:]),
            ({"truncate_prompt_tokens": 500}, ids),
        ):
            answer = client.post("/v1/embeddings", json={"input": ids, **options}).json()
            assert answer["usage"]["prompt_tokens"] == len(kept)
            assert_close(answer["data"][0]["embedding"], reference(llama, kept))
        long = random_prompt(MAX_POSITIONS + 1, 1)
        assert client.post("/v1/embeddings", json={"input": long}).status_code == 400
        answer = client.post("/v1/embeddings", json={"input": long, "truncate_prompt_tokens": -1}).json()
        assert answer["usage"]["prompt_tokens"] == MAX_POSITIONS
