"""Log-probabilities of answers and of prompts against log-softmax of the model's own logits."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from runner.messages import TokenLogprobs
from runner.scheduler import Scheduler
from runner.sequence import Sequence
from tests.models import Family, hf_logits
from tests.parity.harness import Answer, Harness, Prompt
from tests.parity.reference import Sample, sample
from tests.parity.shelf import EngineShelf

overlap = pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])


def expected_logprobs(s: Sample, ids: list[int]) -> Tensor:
    """[len(ids) - 1, vocab]: row i is what the model thinks of position i + 1."""
    return hf_logits(s.path, ids).log_softmax(-1)[:-1]


def assert_entry(entry: TokenLogprobs | None, expected: Tensor, token: int, top: int) -> None:
    """`expected`: [vocab], of the position."""
    assert entry is not None
    assert entry.token == token
    assert entry.logprob == pytest.approx(float(expected[token]), abs=1e-4)
    assert entry.rank == 1 + int((expected > expected[token]).sum())
    best = expected.topk(top)
    assert list(entry.top_tokens) == best.indices.tolist()
    assert entry.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-4)


# --- of the answer --------------------------------------------------------------------------------------------------


def assert_answer_logprobs(s: Sample, answer: Answer, top: int) -> None:
    expected = expected_logprobs(s, s.ids + answer.tokens)[len(s.ids) - 1 :]
    for entry, row, token in zip(answer.logprobs, expected, answer.tokens, strict=True):
        assert_entry(entry, row, token, top)


@overlap
@pytest.mark.parametrize("family", ["llama", "gemma2"])  # Gemma 2 caps its logits.
def test_answer_logprobs_are_the_models(shelf: EngineShelf, family: Family, overlap: bool) -> None:
    """Several at once, with different numbers of alternatives, among others that ask for none; preempted, too."""
    harness = shelf.engine(family, async_scheduling=overlap, block_size=4, num_blocks=33, max_num_batched_tokens=16)
    preemptions = harness.engine.stats().preemptions
    samples = [sample(shelf.path(family), length) for length in (24, 5, 17, 12)]
    tops = [5, None, 0, 20]
    numbers = [harness.add(s.rows, logprobs=top) for s, top in zip(samples, tops, strict=True)]
    others = [harness.add(s.ids, logprobs=1) for s in samples]
    harness.run()
    assert harness.engine.stats().preemptions > preemptions
    for s, number, top in zip(samples, numbers, tops, strict=True):
        answer = harness.answer(number)
        assert answer.tokens == s.tokens
        if top is None:
            assert answer.logprobs == [None] * len(s.tokens)
        else:
            assert_answer_logprobs(s, answer, top)
    for s, number in zip(samples, others, strict=True):
        assert_answer_logprobs(s, harness.answer(number), 1)


@pytest.mark.parametrize(
    "asks",
    [
        {"temperature": 1.7},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.5},
        {"logit_bias": ((7, 50.0),)},
        {"stop_token_ids": tuple(range(4, 300)), "min_tokens": 16},
        {"temperature": 0.9, "top_k": 3, "top_p": 0.9, "min_p": 0.1},
    ],
    ids=lambda asks: "+".join(asks),
)
def test_answer_logprobs_are_of_the_models_own_distribution(shelf: EngineShelf, asks: dict[str, Any]) -> None:
    """Temperature, penalties, biases and filters choose other tokens; they change nothing of what is reported."""
    harness = shelf.engine("llama", async_scheduling=True)
    s = sample(shelf.path("llama"), 24)
    answer = harness.generate(s.ids, 16, logprobs=4, seed=3, **asks)
    assert len(answer.tokens) == 16
    assert_answer_logprobs(s, answer, 4)
    if "top_k" not in asks:
        assert any(entry is not None and entry.rank > 1 for entry in answer.logprobs)


# --- of the prompt --------------------------------------------------------------------------------------------------


def assert_prompt_logprobs(s: Sample, answer: Answer, top: int, embedded: range = range(0)) -> None:
    assert answer.prompt_positions == list(range(1, len(s.ids)))
    expected = expected_logprobs(s, s.ids)
    for position, entry in zip(answer.prompt_positions, answer.prompt_logprobs, strict=True):
        if position in embedded:
            assert entry is None
        else:
            assert_entry(entry, expected[position - 1], s.ids[position], top)


@overlap
@pytest.mark.parametrize("budget", [8, 64], ids=["chunked", "whole"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_prompt_logprobs_are_the_models(shelf: EngineShelf, family: Family, budget: int, overlap: bool) -> None:
    harness = shelf.engine(family, async_scheduling=overlap, max_num_batched_tokens=budget)
    s, other = sample(shelf.path(family), 37), sample(shelf.path(family), 24)
    embedded = range(5, 21)
    mixed: Prompt = (s.ids[:5], s.rows[5:21], s.ids[21:])
    number, mixed_number, plain = (
        harness.add(s.ids, 8, prompt_logprobs=6),
        harness.add(mixed, 8, prompt_logprobs=2),
        harness.add(other.ids),
    )
    harness.run()
    assert_prompt_logprobs(s, harness.answer(number), 6)
    assert_prompt_logprobs(s, harness.answer(mixed_number), 2, embedded)
    assert harness.tokens(number) == harness.tokens(mixed_number) == s.tokens[:8]
    assert harness.tokens(plain) == other.tokens
    assert harness.answer(plain).prompt_positions == []


def test_long_prompts_are_scored_in_parts(shelf: EngineShelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of a whole prompt never exist at once."""
    from runner import device_step

    monkeypatch.setattr(device_step, "SCORE_ROWS", 5)
    harness = shelf.engine("llama")
    s = sample(shelf.path("llama"), 37)
    assert_prompt_logprobs(s, harness.generate(s.ids, 1, prompt_logprobs=3), 3)


@overlap
def test_scoring_alone_makes_no_token(shelf: EngineShelf, overlap: bool) -> None:
    harness = shelf.engine("llama", async_scheduling=overlap, max_num_batched_tokens=8)
    s = sample(shelf.path("llama"), 37)
    number, one_row = harness.add(s.ids, 0, prompt_logprobs=1), harness.add(s.ids[:1], 0, prompt_logprobs=1)
    harness.run()
    assert_prompt_logprobs(s, harness.answer(number), 1)
    assert harness.answer(one_row).prompt_positions == []
    for answer in (harness.answer(number), harness.answer(one_row)):
        assert answer.tokens == []
        assert answer.end is not None and answer.end.reason == "length"
    harness.assert_empty()


def test_a_prompt_that_fills_the_context_can_be_scored(shelf: EngineShelf) -> None:
    harness = shelf.engine("llama", max_model_len=24)
    s = sample(shelf.path("llama"), 24)
    assert_prompt_logprobs(s, harness.generate(s.ids, 0, prompt_logprobs=0), 0)


def test_scored_prompts_read_no_cached_prefix(shelf: EngineShelf) -> None:
    """Every row has to be computed for its logits. What it computes is there for others."""
    harness = shelf.engine("llama", block_size=4)
    s = sample(shelf.path("llama"), 37)
    for _ in range(2):
        answer = harness.generate(s.ids, 2, salt="scored", prompt_logprobs=1)
        assert answer.cached_tokens == 0
        assert_prompt_logprobs(s, answer, 1)
    assert harness.generate(s.ids, 2, salt="scored").cached_tokens == 36


@overlap
def test_siblings_do_not_score_the_prompt_again(shelf: EngineShelf, overlap: bool) -> None:
    harness = shelf.engine("llama", async_scheduling=overlap, max_num_batched_tokens=16)
    s = sample(shelf.path("llama"), 37)
    number = harness.add(s.ids, 8, n=3, prompt_logprobs=2)
    harness.run()
    assert_prompt_logprobs(s, harness.answer(number), 2)
    for choice in range(3):
        assert harness.tokens(number, choice) == s.tokens[:8]


@overlap
@pytest.mark.parametrize("arrival", [8, 15], ids=["after the prompt", "within the prompt"])
def test_each_position_once_whenever_it_is_preempted(
    shelf: EngineShelf, monkeypatch: pytest.MonkeyPatch, arrival: int, overlap: bool
) -> None:
    """Older requests take the blocks away before or after the whole prompt is scored: computed again, sent once."""
    harness = shelf.engine(
        "llama", async_scheduling=overlap, block_size=4, num_blocks=24, max_model_len=80, max_num_batched_tokens=8
    )
    preempted = _watch_preemptions(harness, monkeypatch)
    s = sample(shelf.path("llama"), 37)
    older = [sample(shelf.path("llama"), length) for length in (5, 12)]
    numbers = [harness.add(o.ids) for o in older]

    def between(step: int) -> None:
        if step == arrival:
            numbers.append(harness.add(s.ids, 32, prompt_logprobs=3))

    harness.run(between)
    assert_prompt_logprobs(s, harness.answer(numbers[2]), 3)
    assert [harness.tokens(number) for number in numbers] == [x.tokens for x in (*older, s)]
    ((number, scored),) = preempted
    assert number == numbers[2]
    assert scored == 37 if arrival == 8 else 1 < scored < 37


def _watch_preemptions(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(request, the prompt position that it would have scored next) of every preemption."""
    seen: list[tuple[int, int]] = []
    real = Scheduler._give_back

    def give_back(self: Scheduler, sequence: Sequence) -> None:
        if not sequence.ended:
            seen.append((sequence.request.key[1], sequence.prompt_logprobs_sent))
        real(self, sequence)

    monkeypatch.setattr(Scheduler, "_give_back", give_back)
    return seen
