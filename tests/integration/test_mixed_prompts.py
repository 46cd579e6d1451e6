"""Prompts cut into parts of all kinds answer as Hugging Face does to the same prompt in one piece."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, RepetitionPenaltyLogitsProcessor

from tests.integration.real_server import RealServer, as_npy, as_safetensors, as_torch_file
from tests.integration.test_answers import greedy, reference
from tests.models import CORPUS, TIE, TURN_ID, Family, embed, hf_generate, hf_logits

TOKENS = 16
BLOCK = 16
"""The server's default block size."""


@pytest.fixture(scope="module")
def gemma3(tiny_model: Callable[[Family], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """Its embeddings are scaled: rows are what comes after that."""
    with RealServer(tmp_path_factory.mktemp("gemma3"), tiny_model("gemma3"), dtype="float32") as server:
        yield server.wait_ready()


def cut(path: Path, ids: list[int], rng: random.Random, cuts: int) -> list[dict[str, Any]]:
    """The same prompt in parts, cut at random places. A piece becomes text only if it is tokenised as it was."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    places = sorted(rng.sample(range(1, len(ids)), cuts))
    parts: list[dict[str, Any]] = []
    for start, end in zip([0, *places], [*places, len(ids)], strict=True):
        piece = ids[start:end]
        text = tokenizer.decode(piece)
        kinds = ["token_ids", "prompt_embeds"] + ["text"] * 2 * (tokenizer.encode(text) == piece)
        parts.append(part(rng.choice(kinds), path, piece, text, rng))
    return parts


def part(kind: str, path: Path, ids: list[int], text: str, rng: random.Random) -> dict[str, Any]:
    if kind == "text":
        return {"type": "text", "text": text}
    if kind == "token_ids":
        return {"type": "token_ids", "token_ids": ids}
    return {"type": "prompt_embeds", "data": rng.choice([as_safetensors, as_torch_file, as_npy])(embed(path, ids))}


def clear_texts(path: Path, count: int, rng: random.Random) -> list[list[int]]:
    """Pieces of a text as ids, whose answers are nowhere a near tie."""
    ids = AutoTokenizer.from_pretrained(path).encode(CORPUS)
    found: list[list[int]] = []
    while len(found) < count:
        start, length = rng.randrange(len(ids) - 80), rng.randrange(20, 80)
        prompt = ids[start : start + length]
        best = hf_logits(path, prompt + hf_generate(path, prompt, TOKENS))[length - 1 : -1].topk(2).values
        if (best[:, 0] - best[:, 1]).min() > TIE:
            found.append(prompt)
    return found


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_random_cuts_answer_like_the_whole(
    family: Family, tiny_model: Callable[[Family], Path], request: pytest.FixtureRequest
) -> None:
    """One at a time, and all in one batch."""
    server: RealServer = request.getfixturevalue("server" if family == "llama" else "gemma3")
    path, rng = tiny_model(family), random.Random(family)
    texts = clear_texts(path, 7, rng)
    # From not at all to at every place, where each part is one row.
    prompts = [cut(path, ids, rng, len(ids) - 1 if ids is texts[-1] else cuts) for cuts, ids in enumerate(texts)]
    assert {part["type"] for parts in prompts for part in parts} == {"text", "token_ids", "prompt_embeds"}
    expected = [hf_generate(path, ids, TOKENS) for ids in texts]
    options = {"max_tokens": TOKENS, "return_token_ids": True}
    with server.client() as client:
        for prompt, ids, answer in zip(prompts, texts, expected, strict=True):
            body = client.post("/v1/completions", json=greedy(prompt=prompt, cache_salt="one", **options)).json()
            assert body["choices"][0]["token_ids"] == answer
            assert body["usage"]["prompt_tokens"] == len(ids)
        body = client.post("/v1/completions", json=greedy(prompt=prompts, n=2, cache_salt="all", **options)).json()
    assert [choice["token_ids"] for choice in body["choices"]] == [answer for answer in expected for _ in range(2)]
    assert body["usage"]["prompt_tokens"] == sum(map(len, texts))


def test_mixed_and_plain_prompts_share_what_is_equal(server: RealServer, llama: Path) -> None:
    (ids,) = clear_texts(llama, 1, random.Random(5))
    ids = (ids * 4)[: 4 * BLOCK + 5]

    def mixed(at: int, length: int) -> list[dict[str, Any]]:
        rows = {"type": "prompt_embeds", "data": as_safetensors(embed(llama, ids[at : at + length]))}
        pieces = [{"type": "token_ids", "token_ids": piece} for piece in (ids[:at], ids[at + length :])]
        return [pieces[0], rows, pieces[1]]

    with server.client() as client:

        def cached(prompt: Any) -> int:
            answer = client.post("/v1/completions", json=greedy(prompt=prompt, max_tokens=1, cache_salt="shared"))
            return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert cached(ids) == 0
        assert cached([{"type": "token_ids", "token_ids": ids[:7]}, {"type": "token_ids", "token_ids": ids[7:]}]) == 64
        assert cached(mixed(2 * BLOCK, 3)) == 2 * BLOCK
        assert cached(mixed(2 * BLOCK - 1, 3)) == BLOCK
        assert cached(mixed(2 * BLOCK, 3)) == cached(mixed(2 * BLOCK - 1, 3)) == 4 * BLOCK
        assert cached(ids) == 4 * BLOCK


def test_prompt_logprobs_are_those_of_the_ids(server: RealServer, llama: Path) -> None:
    (ids,) = clear_texts(llama, 1, random.Random(6))
    rows = {"type": "prompt_embeds", "data": as_npy(embed(llama, ids[5:9]))}
    mixed = [{"type": "token_ids", "token_ids": ids[:5]}, rows, {"type": "token_ids", "token_ids": ids[9:]}]
    with server.client() as client:
        whole, parts = (
            client.post("/v1/completions", json=greedy(prompt=prompt, prompt_logprobs=0)).json()["choices"][0]
            for prompt in (ids, mixed)
        )
    assert parts["text"] == whole["text"]
    assert [each is None for each in parts["prompt_logprobs"]] == [at in (0, 5, 6, 7, 8) for at in range(len(ids))]
    for at, token in enumerate(ids):
        if parts["prompt_logprobs"][at] is not None:
            found, wanted = (each["prompt_logprobs"][at][str(token)]["logprob"] for each in (parts, whole))
            assert found == pytest.approx(wanted, abs=1e-3)


def test_penalties_count_the_tokens_among_the_rows(server: RealServer, llama: Path) -> None:
    """Neither all of the prompt nor nothing of it."""
    ids = clear_texts(llama, 1, random.Random(7))[0][:24]
    tokens = ids[:8] + ids[16:]
    rows = {"type": "prompt_embeds", "data": as_npy(embed(llama, ids[8:16]))}
    mixed = [{"type": "token_ids", "token_ids": ids[:8]}, rows, {"type": "token_ids", "token_ids": ids[16:]}]
    processor = RepetitionPenaltyLogitsProcessor(0.25)  # below 1, so that a token of the prompt comes up

    def penalised(counted: list[int]) -> list[int]:
        made: list[int] = []
        while len(made) < TOKENS:
            scores = hf_logits(llama, ids + made)[-1:]
            made.append(int(processor(torch.tensor([counted + made]), scores).argmax()))
        return made

    body = greedy(prompt=mixed, repetition_penalty=0.25, max_tokens=TOKENS, return_token_ids=True)
    with server.client() as client:
        found = client.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]
    assert found == penalised(tokens)
    assert found not in (penalised(ids), penalised([ids[-1]]))


def test_chat(server: RealServer, llama: Path) -> None:
    """The template's text around the embeddings, tokenised in pieces."""
    tokenizer = AutoTokenizer.from_pretrained(llama)
    inner = tokenizer.encode("colour and grain")
    ids = tokenizer.encode("<bos><turn>user\nFile the") + inner + tokenizer.encode(" pieces<eos>\n<turn>assistant\n")
    assert ids.count(TURN_ID) == 2
    content = [
        {"type": "text", "text": "File the"},
        {"type": "prompt_embeds", "data": as_torch_file(embed(llama, inner))},
        {"type": "text", "text": " pieces"},
    ]
    messages = [{"role": "user", "content": content}]
    with server.client() as client:
        body = client.post("/v1/chat/completions", json=greedy(messages=messages)).json()
    assert body["choices"][0]["message"]["content"] == reference(llama, ids)
    assert body["usage"]["prompt_tokens"] == len(ids)
