"""/v1/token_embeddings and return_hidden_states end to end: rows out of the server, and back into it."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoTokenizer

from tests.integration.real_server import RealServer, as_safetensors
from tests.models import HIDDEN_SIZE, VOCAB_SIZE, Family, clear_prompt, embed, hf_generate, hf_hidden, hf_logits

RAW = {"Accept": "application/octet-stream"}


def tensor_of(file: bytes) -> Tensor:
    (rows,) = safetensors.torch.load(file).values()
    return rows


def decoded(member: dict[str, Any]) -> Tensor:
    return tensor_of(base64.b64decode(member["data"]))


def test_rows_out_and_back_in(server: RealServer, llama: Path) -> None:
    """The body is a prompt embedding as it is: the answer to it is the answer to the ids."""
    ids = clear_prompt(llama, 40, seed=12)
    with server.client() as client:
        answer = client.post("/v1/token_embeddings", json={"model": "m", "input": ids}).json()
        raw = client.post("/v1/token_embeddings", json={"input": ids}, headers=RAW)
        greedy = {"model": "m", "max_tokens": 32, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        completion = client.post("/v1/completions", json={**greedy, "prompt_embeds": answer["data"]}).json()
    assert (answer["rows"], answer["hidden"], answer["dtype"]) == (40, HIDDEN_SIZE, "float32")
    assert (answer["object"], answer["model"], answer["token_ids"]) == ("token_embeddings", "m", ids)
    assert raw.headers["content-type"] == "application/octet-stream"
    for rows in (decoded(answer), tensor_of(raw.content)):
        assert torch.equal(rows, embed(llama, ids))
    assert completion["choices"][0]["token_ids"] == hf_generate(llama, ids)


def test_of_a_text(server: RealServer, llama: Path) -> None:
    text = "What is the capital of France?"
    ids = AutoTokenizer.from_pretrained(llama)(text)["input_ids"]
    with server.client() as client:
        answer = client.post("/v1/token_embeddings", json={"input": text}).json()
        assert answer["token_ids"] == ids
        assert torch.equal(decoded(answer), embed(llama, ids))
        described = client.get("/v1/token_embeddings").json()
    assert described == {
        "object": "token_embeddings", "model": "m", "hidden": HIDDEN_SIZE, "dtype": "float32", "scale": 1.0,
        "vocab_size": VOCAB_SIZE, "max_rows": 512,
    }  # fmt: skip


def test_a_scaled_table_in_bfloat16(tiny_model: Callable[[Family], Path], tmp_path: Path) -> None:
    """Gemma multiplies by the root of its width: the rows are what its own module makes of the ids."""
    path = tiny_model("gemma3")
    ids = list(range(4, 200))
    with RealServer(tmp_path, path, dtype="bfloat16") as server, server.wait_ready().client() as client:
        found = tensor_of(client.post("/v1/token_embeddings", json={"input": ids}, headers=RAW).content)
        scale = client.get("/v1/token_embeddings").json()["scale"]
        means = client.post("/v1/embeddings", json={"input": ids}).json()["data"][0]["embedding"]
        lasts = client.post("/v1/embeddings", json={"input": ids, "pooling": "last"}).json()["data"][0]["embedding"]
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    assert torch.equal(found, model.get_input_embeddings()(torch.tensor(ids)))
    assert scale == HIDDEN_SIZE**0.5 == 8.0
    # Of a model in bfloat16 no more can be expected than that they are close.
    hidden = hf_hidden(path, ids)
    for pooled, expected in ((means, hidden.mean(0)), (lasts, hidden[-1])):
        assert float(torch.cosine_similarity(torch.tensor(pooled), expected, dim=0)) > 0.99
        assert float(torch.tensor(pooled).norm()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("mode", ["last", "answer", "all"])
def test_hidden_states(server: RealServer, llama: Path, mode: str) -> None:
    """Of two prompts with two choices each, whole; and of one, streamed."""
    prompts = [clear_prompt(llama, length, seed=length) for length in (9, 40)]
    body = {"model": "m", "max_tokens": 8, "temperature": 1.0, "seed": 4, "ignore_eos": True, "return_token_ids": True}
    with server.client() as client:
        response = client.post(
            "/v1/completions", json={**body, "prompt": prompts, "n": 2, "return_hidden_states": mode}
        )
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    assert len(choices) == 4
    for choice in choices:
        prompt = prompts[choice["index"] // 2]
        expected = hf_hidden(llama, prompt + choice["token_ids"][:-1])
        begin = {"last": len(expected) - 1, "answer": len(prompt) - 1, "all": 0}[mode]
        member = choice["hidden_states"]
        assert member["start"] == begin
        torch.testing.assert_close(decoded(member), expected[begin:], atol=2e-5, rtol=1e-5)


def test_latent_steps(server: RealServer, llama: Path) -> None:
    """Completions and chats think four rows, and answer as a plain transformers loop does."""
    ids = clear_prompt(llama, 20, seed=2)
    rows = embed(llama, ids)
    for _ in range(4):
        rows = torch.cat([rows, hf_hidden(llama, rows)[-1:]])
    body = {"model": "m", "max_tokens": 3, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with server.client() as client:
        asked = {**body, "prompt": ids, "latent_steps": 4, "return_hidden_states": "all", "n": 2}
        answer = client.post("/v1/completions", json=asked).json()
        chat = {**body, "messages": [{"role": "user", "content": "hello"}]}
        thinking = client.post("/v1/chat/completions", json={**chat, "latent_steps": 2}).json()
        prompt = client.post("/v1/chat/completions/render", json=chat).json()["token_ids"]
    tokens = hf_generate(llama, rows, 3)
    expected = hf_hidden(llama, torch.cat([rows, embed(llama, tokens[:-1])]))
    for choice in answer["choices"]:
        assert choice["token_ids"] == tokens
        assert choice["hidden_states"]["rows"] == 20 + 4 + 2
        torch.testing.assert_close(decoded(choice["hidden_states"]), expected, atol=2e-3, rtol=1e-3)
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (20, 6)
    rows = embed(llama, prompt)
    for _ in range(2):
        rows = torch.cat([rows, hf_hidden(llama, rows)[-1:]])
    assert thinking["choices"][0]["token_ids"] == hf_generate(llama, rows, 3)


def test_latent_reasoning_from_outside(server: RealServer, llama: Path) -> None:
    """The last state is the next row, four times; then tokens: a plain transformers loop does the same."""
    ids = clear_prompt(llama, 20, seed=2)
    expected = embed(llama, ids)
    with server.client() as client:
        rows = expected
        for _ in range(4):
            body = {"prompt_embeds": as_safetensors(rows), "max_tokens": 0, "return_hidden_states": "last"}
            choice = client.post("/v1/completions", json=body).json()["choices"][0]
            rows = torch.cat([rows, decoded(choice["hidden_states"])])
            expected = torch.cat([expected, hf_hidden(llama, expected)[-1:]])
        torch.testing.assert_close(rows, expected, atol=2e-4, rtol=1e-4)
        body = {"prompt_embeds": as_safetensors(rows), "max_tokens": 1, "temperature": 0, "return_token_ids": True}
        answer = client.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]
    assert answer == [int(hf_logits(llama, expected)[-1].argmax())]
