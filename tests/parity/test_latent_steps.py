"""Latent steps against a plain loop in transformers: the last hidden state is the next row, k times over."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner.grammar import MaskRow, Outcome
from runner.sequence import InvalidRequest
from tests.models import EOS_ID, Family, embed, hf_generate, hf_hidden, hf_logits, random_prompt
from tests.parity.harness import Answer, Harness
from tests.parity.shelf import EngineShelf
from tests.parity.test_hidden_states import _Graphs, rows_of

overlap = pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
TOKENS = 12


@functools.cache
def thought(path: Path, length: int, steps: int, seed: int = 0) -> tuple[list[int], Tensor, list[int]]:
    """(a prompt, its rows and the latent ones behind them, the greedy answer): one without near ties, which rounding
    could decide, and whose latent steps matter."""
    for attempt in range(100):
        ids = random_prompt(length, 1000 * seed + length + 1_000_003 * attempt)
        rows = embed(path, ids)
        for _ in range(steps):
            rows = torch.cat([rows, hf_hidden(path, rows)[-1:]])
        tokens = hf_generate(path, rows, TOKENS)
        answered = torch.cat([rows, embed(path, tokens[:-1])])
        best = hf_logits(path, answered)[len(rows) - 1 :].topk(2).values
        if (best[:, 0] - best[:, 1]).min() > 0.02 and tokens != hf_generate(path, ids, TOKENS):
            return ids, rows, tokens
    raise AssertionError("no usable prompt in a hundred")


def assert_like(answer: Answer, tokens: list[int]) -> None:
    assert answer.tokens == tokens
    assert answer.end is not None and answer.end.reason == "length"


@overlap
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_tokens_behind_latent_steps(shelf: EngineShelf, family: Family, overlap: bool) -> None:
    """Of different numbers, as ids and as embeddings, in chunks, beside requests without."""
    harness = shelf.engine(family, async_scheduling=overlap, max_num_batched_tokens=16)
    asked = []
    for length, steps in ((5, 1), (24, 4), (16, 7), (37, 2)):
        ids, rows, tokens = thought(shelf.path(family), length, steps)
        asked.append((harness.add(ids, TOKENS, latent_steps=steps), tokens))
        asked.append((harness.add(rows[:length], TOKENS, latent_steps=steps), tokens))
        asked.append((harness.add(ids, TOKENS), hf_generate(shelf.path(family), ids, TOKENS)))
    harness.run()
    for number, tokens in asked:
        assert_like(harness.answer(number), tokens)
    harness.assert_empty()


@overlap
def test_preempted_in_and_behind_latent_steps(shelf: EngineShelf, overlap: bool) -> None:
    """What had been thought is given back, row by row, and gone on with."""
    harness = shelf.engine("llama", async_scheduling=overlap, block_size=4, num_blocks=33, max_num_batched_tokens=16)
    preempted: list[tuple[int, int]] = []

    def between(step: int) -> None:
        preempted.extend(
            (len(sequence.token_ids) - 24, sequence.request.sampling.latent_steps)
            for sequence in harness.engine.scheduler.waiting
            if sequence.started
        )

    for latest in (12, 3):  # the newest one is preempted
        asked = [(thought(shelf.path("llama"), 24, steps, seed), steps) for seed, steps in enumerate((5, 5, 5, latest))]
        numbers = [harness.add(ids, TOKENS, latent_steps=steps) for (ids, _, _), steps in asked]
        harness.run(between)
        for number, ((_, _, tokens), _) in zip(numbers, asked, strict=True):
            assert_like(harness.answer(number), tokens)
    assert any(0 < rows < steps for rows, steps in preempted)
    assert any(rows > steps for rows, steps in preempted)
    harness.assert_empty()


@overlap
def test_the_prefix_cache(shelf: EngineShelf, overlap: bool) -> None:
    """The prompt's blocks are shared with everybody, latent rows with no embeddings, though all ids be the same."""
    harness = shelf.engine("llama", async_scheduling=overlap)
    path = shelf.path("llama")
    ids, rows, tokens = thought(path, 40, 10, seed=1)
    assert_like(harness.generate(ids, TOKENS, latent_steps=10), tokens)
    again = harness.generate(ids, TOKENS, latent_steps=10)
    assert_like(again, tokens)
    assert again.cached_tokens == 32
    # The same mask, the same rows even: but who sends them as embeddings may send any.
    plain = harness.generate((ids, rows[40:], tokens), TOKENS)
    assert plain.cached_tokens == 32
    expected = hf_generate(path, torch.cat([rows, embed(path, tokens)]), TOKENS)
    assert_like(plain, expected)


@overlap
@pytest.mark.parametrize("mode", ["last", "answer", "all"])
def test_their_hidden_states(shelf: EngineShelf, mode: str, overlap: bool) -> None:
    """They are rows like the prompt's; without an answer, the last one's state is the last."""
    harness = shelf.engine("llama", async_scheduling=overlap, max_num_batched_tokens=16)
    path = shelf.path("llama")
    ids, rows, tokens = thought(path, 24, 4)
    for made in (0, 1, TOKENS):
        number = harness.add(ids, made, latent_steps=4, return_hidden_states=mode)
        harness.run()
        answer = harness.answer(number)
        assert_like(answer, tokens[:made])
        expected = hf_hidden(path, torch.cat([rows, embed(path, tokens)])[: len(rows) + max(made - 1, 0)])
        begin = {"last": len(expected) - 1, "answer": len(rows) - 1, "all": 0}[mode]
        start, found = rows_of(answer.hidden)
        assert (start, len(found)) == (begin, len(expected) - begin)
        torch.testing.assert_close(found, expected[begin:], atol=2e-3, rtol=1e-3)
    harness.assert_empty()


@overlap
def test_with_all_that_sampling_may_ask(shelf: EngineShelf, overlap: bool) -> None:
    """Several choices, log-probabilities, penalties, bans and an ending token: each counts from the first token on."""
    harness = shelf.engine("llama", async_scheduling=overlap)
    path = shelf.path("llama")
    ids, rows, tokens = thought(path, 24, 4)
    number = harness.add(ids, TOKENS, n=3, latent_steps=4, logprobs=1)
    harness.run()
    logprobs = hf_logits(path, torch.cat([rows, embed(path, tokens)])).log_softmax(-1)
    for choice in range(3):
        answer = harness.answer(number, choice)
        assert_like(answer, tokens)
        for place, (token, entry) in enumerate(zip(tokens, answer.logprobs, strict=True)):
            assert entry is not None
            assert entry.logprob == pytest.approx(float(logprobs[len(rows) - 1 + place, token]), abs=1e-3)
    # The same as what follows the same rows, sent as embeddings.
    options: list[dict[str, Any]] = [
        {"presence_penalty": 1.5, "frequency_penalty": 1.0},
        {"bad_words": ((tokens[0],), (tokens[1], tokens[2]))},
        {"stop_token_ids": (tokens[0], tokens[5]), "min_tokens": 3},
        {"temperature": 1.0, "seed": 5, "top_k": 20},
    ]
    for each in options:
        latent = harness.generate(ids, TOKENS, latent_steps=4, **each)
        plain = harness.generate((ids, rows[24:]), TOKENS, **each)
        assert latent.tokens == plain.tokens, each
        assert latent.end is not None and plain.end is not None
        assert (latent.end.reason, latent.end.stop_token) == (plain.end.reason, plain.end.stop_token)


@overlap
def test_a_grammar_begins_with_the_answer(shelf: EngineShelf, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No mask is made for a latent step, and an answer that may end at once has its least length."""
    harness = shelf.engine("llama", async_scheduling=overlap)
    ids, rows, _ = thought(shelf.path("llama"), 24, 4)
    grammar = json.dumps({"grammars": [{"lark_grammar": "start: /[a-z ]*/"}]})
    asked: list[int] = []
    fill = harness.engine._grammars.fill

    def counted(rows: list[MaskRow], masks: NDArray[np.int32]) -> list[Outcome | None]:
        asked.append(len(rows))
        return fill(rows, masks)

    monkeypatch.setattr(harness.engine._grammars, "fill", counted)
    for least in (0, 3):
        options: dict[str, Any] = {"grammar": grammar, "stop_token_ids": (EOS_ID,), "min_tokens": least}
        # Nothing but the ending token is wanted, wherever it is allowed.
        options["logit_bias"] = ((EOS_ID, 100.0),)
        latent = harness.generate(ids, TOKENS, latent_steps=4, **options)
        assert len(asked) == len(latent.tokens) == least + 1
        asked.clear()
        plain = harness.generate((ids, rows[24:]), TOKENS, **options)
        assert latent.tokens == plain.tokens
        asked.clear()


def test_replayed_from_graphs(shelf: EngineShelf) -> None:
    harness = Harness(shelf.path("llama"), max_num_batched_tokens=16, async_scheduling=True)
    graphs: Any = _Graphs(harness.engine.device)
    harness.engine.device._graphs = graphs
    ids, _, tokens = thought(shelf.path("llama"), 24, 4)
    numbers = [harness.add(ids, TOKENS, latent_steps=4) for _ in range(3)]
    harness.run()
    assert graphs.replays == harness.engine.stats().steps
    for number in numbers:
        assert_like(harness.answer(number), tokens)


@overlap
def test_up_to_the_contexts_end(shelf: EngineShelf, overlap: bool) -> None:
    harness = shelf.engine("llama", async_scheduling=overlap)
    ids = random_prompt(100, 0)
    answer = harness.generate(ids, 8, latent_steps=20)
    assert (len(answer.tokens), answer.end is not None) == (8, True)
    for steps, made in ((21, 8), (20, 9), (-1, 8), (2**31, 8)):
        with pytest.raises(InvalidRequest):
            harness.add(ids, made, latent_steps=steps)
    with pytest.raises(InvalidRequest):
        harness.add(ids, 0, latent_steps=1, return_hidden_states="mean")
    harness.assert_empty()


@overlap
def test_aborted_on_the_way(shelf: EngineShelf, overlap: bool) -> None:
    harness = shelf.engine("llama", async_scheduling=overlap)
    ids, _, tokens = thought(shelf.path("llama"), 24, 4)
    number = harness.add(ids, TOKENS, latent_steps=50)
    other = harness.add(ids, TOKENS, latent_steps=4)

    def between(step: int) -> None:
        if step == 6:
            harness.engine.abort((0, number))

    harness.run(between)
    assert harness.answer(number).tokens == []
    assert_like(harness.answer(other), tokens)
    assert harness.engine.stats().generated_tokens >= TOKENS
    harness.assert_empty()


def test_nothing_is_counted_as_generated(shelf: EngineShelf) -> None:
    harness = shelf.engine("llama")
    before = harness.engine.stats()
    harness.generate(random_prompt(9, 4), 3, latent_steps=6)
    after = harness.engine.stats()
    assert after.generated_tokens - before.generated_tokens == 3
    assert after.prompt_tokens - before.prompt_tokens == 9


@overlap
def test_what_others_have_thought_does_not_show(shelf: EngineShelf, overlap: bool) -> None:
    harness = shelf.engine("llama", async_scheduling=overlap)
    ids, _, tokens = thought(shelf.path("llama"), 24, 4)
    for _ in range(2):
        harness.fill_with_garbage(cache=False)
        assert_like(harness.generate(ids, TOKENS, latent_steps=4, return_hidden_states="all"), tokens)
