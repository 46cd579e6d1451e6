"""Token ids as hints on embedding parts: counted by penalties, told by prompt log-probabilities, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integration.real_server import RealServer, as_npy
from tests.integration.test_answers import greedy
from tests.models import embed, hf_generate, hf_logits, random_prompt
from tests.parity.reference import penalised

TOKENS = 16


def parts(model: Path, ids: list[int], hints: Sequence[int | None] | None, start: int = 8, end: int = 16) -> Any:
    rows: dict[str, Any] = {"type": "prompt_embeds", "data": as_npy(embed(model, ids[start:end]))}
    if hints is not None:
        rows["token_ids"] = hints
    before, after = ({"type": "token_ids", "token_ids": piece} for piece in (ids[:start], ids[end:]))
    return [before, rows, after]


def test_penalties_count_hints(server: RealServer, llama: Path) -> None:
    """All hinted is as if the rows were ids; some count alone; wrong ones are taken at their word."""
    tried = 0
    with server.client() as client:
        for seed in range(20):
            ids = random_prompt(24, seed)
            tokens, inner = ids[:8] + ids[16:], ids[8:16]
            some: list[int | None] = [token if place % 2 else None for place, token in enumerate(inner)]
            wrong: list[int | None] = [5 + place for place in range(8)]
            answers = []
            for hints in (None, list(inner), some, wrong):
                counted = tokens + [token for token in hints or [] if token is not None]
                expected = penalised(llama, ids, counted, 0.25, TOKENS)
                body = greedy(prompt=parts(llama, ids, hints), repetition_penalty=0.25, max_tokens=TOKENS)
                found = client.post("/v1/completions", json={**body, "return_token_ids": True}).json()
                if expected is not None:
                    assert found["choices"][0]["token_ids"] == expected
                    answers.append(tuple(expected))
            tried += len(set(answers)) == 4
            if tried == 2:
                return
    raise AssertionError("no prompt in twenty whose answers differ by what is counted")


def test_prompt_logprobs_are_of_the_hinted_ids(server: RealServer, llama: Path) -> None:
    ids = random_prompt(20, 3)
    hints: list[int | None] = [ids[5], None, 9, ids[8]]
    body = greedy(prompt=parts(llama, ids, hints, 5, 9), prompt_logprobs=2, max_tokens=1)
    expected = hf_logits(llama, ids).log_softmax(-1)
    with server.client() as client:
        found = client.post("/v1/completions", json=body).json()["choices"][0]["prompt_logprobs"]
    asked = [*ids[:5], *hints, *ids[9:]]
    assert [entry is None for entry in found] == [at == 0 or token is None for at, token in enumerate(asked)]
    for at, token in enumerate(asked):
        if at and token is not None:
            row = expected[at - 1]
            entry = found[at][str(token)]
            assert entry["logprob"] == pytest.approx(float(row[token]), abs=1e-3)
            assert entry["rank"] == 1 + int((row > row[token]).sum())


def test_hints_change_neither_the_answer_nor_the_cache(server: RealServer, llama: Path) -> None:
    """A hinted prompt finds the blocks of the same prompt without hints, and with other ones."""
    ids = random_prompt(40, 11)
    expected = hf_generate(llama, ids, TOKENS)
    options = {"max_tokens": TOKENS, "return_token_ids": True, "cache_salt": "hints"}
    cached = []
    with server.client() as client:
        for hints in (None, ids[8:16], [5] * 8, [None] * 8):
            body = client.post("/v1/completions", json=greedy(prompt=parts(llama, ids, hints), **options)).json()
            assert body["choices"][0]["token_ids"] == expected
            cached.append(body["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 32, 32, 32]


def test_in_a_chat(server: RealServer, llama: Path) -> None:
    """Beside a part without hints, in another message."""
    ids = random_prompt(6, 2)
    rows = {"type": "prompt_embeds", "data": as_npy(embed(llama, ids))}
    messages = [
        {"role": "system", "content": [rows]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {**rows, "token_ids": ids}]},
    ]
    with server.client() as client:
        body = client.post("/v1/chat/completions", json=greedy(messages=messages, prompt_logprobs=0)).json()
    told = body["prompt_logprobs"]
    assert sum(entry is None for entry in told) == 1 + len(ids)
    hinted = [next(iter(entry)) for entry in told if entry is not None]
    assert ",".join(map(str, ids)) in ",".join(hinted)
