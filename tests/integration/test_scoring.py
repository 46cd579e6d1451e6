"""Log-likelihoods as evaluation harnesses read them, and what else is said of a prompt, against plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.real_server import RealServer, as_safetensors
from tests.models import EOS_ID, TIE, clear_prompt, embed, hf_generate, hf_logits, random_prompt

CONTEXTS = [random_prompt(length, seed) for seed, length in enumerate((1, 9, 40))]
CONTINUATION = random_prompt(7, 99)


def log_likelihood(path: Path, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Of `continuation` behind `context`, and whether greedy decoding would say it: plain transformers."""
    logprobs = hf_logits(path, context + continuation).log_softmax(-1)[len(context) - 1 : -1]
    chosen = logprobs.gather(1, torch.tensor(continuation)[:, None])[:, 0]
    return float(chosen.sum()), logprobs.argmax(-1).tolist() == continuation


def as_the_harness_reads_it(choice: dict[str, Any], context_length: int) -> tuple[float, bool]:
    """What lm-eval's `local-completions` makes of an answer to `echo`, `logprobs: 1`, `max_tokens: 1`."""
    values = choice["logprobs"]["token_logprobs"][context_length:-1]
    tops = choice["logprobs"]["top_logprobs"][context_length:-1]
    return sum(values), all(value == max(top.values()) for value, top in zip(values, tops, strict=True))


@pytest.mark.parametrize("as_ids", [False, True])
def test_log_likelihoods(server: RealServer, llama: Path, as_ids: bool) -> None:
    """Several prompts at once, one of them with the continuation that greedy decoding would say."""
    clear = clear_prompt(llama, 12, seed=4, max_new_tokens=7)
    asked = [*((context, CONTINUATION) for context in CONTEXTS), (clear, hf_generate(llama, clear, 7))]
    body = {"model": "m", "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1234}
    body |= {"prompt": [context + continuation for context, continuation in asked]}
    with server.client() as client:
        response = client.post("/v1/completions", json={**body, "return_tokens_as_token_ids": as_ids})
    assert response.status_code == 200, response.text
    for (context, continuation), choice in zip(asked, response.json()["choices"], strict=True):
        expected, greedy = log_likelihood(llama, context, continuation)
        value, is_greedy = as_the_harness_reads_it(choice, len(context))
        assert value == pytest.approx(expected, abs=1e-3)
        assert is_greedy == greedy
        tokens = choice["logprobs"]["tokens"]
        assert len(tokens) == len(context) + len(continuation) + 1
        if as_ids:
            assert tokens[:-1] == [f"token_id:{token}" for token in context + continuation]
    assert greedy, "the last one was to be"


def test_scoring_without_an_answer(server: RealServer, llama: Path) -> None:
    context = CONTEXTS[2]
    body = {"model": "m", "prompt": context, "max_tokens": 0, "logprobs": 0, "echo": True}
    with server.client() as client:
        answer = client.post("/v1/completions", json=body).json()
    first, *values = answer["choices"][0]["logprobs"]["token_logprobs"]
    assert first is None
    assert sum(values) == pytest.approx(log_likelihood(llama, context[:1], context[1:])[0], abs=1e-3)
    assert answer["usage"]["completion_tokens"] == 0


def test_prompt_logprobs(server: RealServer, llama: Path) -> None:
    """The best tokens with their ranks, the same twice (the second time the prefix is cached); none for embeddings."""
    ids = clear_prompt(llama, 30, seed=6, max_new_tokens=4)
    logprobs = hf_logits(llama, ids).log_softmax(-1)
    with server.client() as client:

        def ask(**prompt: Any) -> list[Any]:
            body = {"model": "m", "max_tokens": 2, "prompt_logprobs": 2, **prompt}
            response = client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            found: list[Any] = response.json()["choices"][0]["prompt_logprobs"]
            return found

        found, again = ask(prompt=ids), ask(prompt=ids)
        embedded = ask(prompt_embeds=as_safetensors(embed(llama, ids)))
    assert found == again
    assert embedded == [None] * len(ids)
    assert (len(found), found[0]) == (len(ids), None)
    for position in range(1, len(ids)):
        entry, expected = found[position], logprobs[position - 1]
        own = entry[str(ids[position])]
        assert own["logprob"] == pytest.approx(float(expected[ids[position]]), abs=1e-3)
        ranked = sorted(entry.values(), key=lambda each: each["rank"])
        assert ranked[0]["logprob"] == pytest.approx(float(expected.max()), abs=1e-3)
        better = int((expected > expected[ids[position]] + TIE).sum())
        assert own["rank"] >= better + 1


def test_the_best_of_several_is_the_most_probable(server: RealServer, llama: Path) -> None:
    """Ranked by what transformers says of each choice."""
    ids = clear_prompt(llama, 10, seed=8, max_new_tokens=4)
    body = {"model": "m", "prompt": ids, "max_tokens": 6, "temperature": 1.5, "seed": 3, "return_token_ids": True}
    with server.client() as client:
        made = client.post("/v1/completions", json={**body, "n": 4}).json()["choices"]
        best = client.post("/v1/completions", json={**body, "n": 2, "best_of": 4}).json()

    def per_token(choice: dict[str, Any]) -> float:
        return log_likelihood(llama, ids, choice["token_ids"])[0] / len(choice["token_ids"])

    expected = sorted(made, key=per_token, reverse=True)[:2]
    assert [choice["token_ids"] for choice in best["choices"]] == [choice["token_ids"] for choice in expected]
    assert best["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in made)


def test_bans_end_to_end(server: RealServer, llama: Path) -> None:
    ids = clear_prompt(llama, 16, seed=2, max_new_tokens=8)
    greedy = hf_generate(llama, ids, 8)
    allowed = [token for token in range(4, 300) if token != greedy[0]]
    logits = hf_logits(llama, ids)[-1]
    expected = max(allowed, key=lambda token: float(logits[token]))
    body = {"model": "m", "prompt": ids, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    with server.client() as client:
        found = client.post("/v1/completions", json={**body, "allowed_token_ids": allowed}).json()
        assert found["choices"][0]["token_ids"] == [expected]
        only = client.post("/v1/completions", json={**body, "max_tokens": 3, "allowed_token_ids": [EOS_ID]}).json()
        assert (only["choices"][0]["token_ids"], only["choices"][0]["finish_reason"]) == ([EOS_ID], "stop")
