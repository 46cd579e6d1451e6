"""Hidden states that the engine sends, against those of plain transformers: alone and in batches, in chunks, preempted,
beside cached prefixes, overlapped."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from runner.device_step import DeviceStep, Launched
from runner.messages import HiddenRows
from runner.step_graphs import StepSize
from tests.models import Family, hf_hidden
from tests.parity.harness import Answer, Harness, Prompt
from tests.parity.reference import Sample, sample
from tests.parity.shelf import EngineShelf

overlap = pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])

MODES = ("last", "answer", "all")


def rows_of(parts: list[HiddenRows]) -> tuple[int, Tensor]:
    """(the first position, [n, hidden]); each position once, in order."""
    assert parts
    blocks = [torch.from_numpy(np.frombuffer(part.rows, np.float32).reshape(-1, 64).copy()) for part in parts]
    place = parts[0].start
    for part, block in zip(parts, blocks, strict=True):
        assert part.start == place
        place += len(block)
    return parts[0].start, torch.cat(blocks)


def assert_hidden(s: Sample, answer: Answer, mode: str, *, first_choice: bool = True) -> None:
    start, found = rows_of(answer.hidden)
    expected = hf_hidden(s.path, s.ids + answer.tokens[:-1])
    begin = {"last": len(expected) - 1, "answer": len(s.ids) - 1, "all": 0 if first_choice else len(s.ids) - 1}[mode]
    assert (start, len(found)) == (begin, len(expected) - begin)
    torch.testing.assert_close(found, expected[begin:], atol=2e-5, rtol=1e-5)


@overlap
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_hidden_states_are_the_models(shelf: EngineShelf, family: Family, overlap: bool) -> None:
    """Every mode at once, as ids, as embeddings and as both, in chunks, among others that ask for none."""
    harness = shelf.engine(family, async_scheduling=overlap, max_num_batched_tokens=16)
    asked: list[tuple[Sample, int, str]] = []
    for length in (5, 24, 37):
        s = sample(shelf.path(family), length)
        prompts: list[Prompt] = [s.ids, s.rows, s.pieces(length)]
        for mode, prompt in zip(MODES, prompts, strict=True):
            asked.append((s, harness.add(prompt, 9, return_hidden_states=mode), mode))
        asked.append((s, harness.add(s.ids, 9), ""))
    harness.run()
    for s, number, mode in asked:
        answer = harness.answer(number)
        assert answer.tokens == s.tokens[:9]
        if mode:
            assert_hidden(s, answer, mode)
        else:
            assert answer.hidden == []
    harness.assert_empty()


@overlap
def test_preempted_requests_send_each_state_once(shelf: EngineShelf, overlap: bool) -> None:
    harness = shelf.engine("llama", async_scheduling=overlap, block_size=4, num_blocks=33, max_num_batched_tokens=16)
    before = harness.engine.stats().preemptions
    s = sample(shelf.path("llama"), 24)
    asked = [(harness.add(s.rows, return_hidden_states=mode), mode) for mode in MODES * 2]
    means = [harness.add(s.rows, 0, return_hidden_states="mean") for _ in range(3)]
    harness.run()
    assert harness.engine.stats().preemptions > before
    for number, mode in asked:
        assert harness.tokens(number) == s.tokens
        assert_hidden(s, harness.answer(number), mode)
    for number in means:
        assert_mean(s, harness.answer(number))


def assert_mean(s: Sample, answer: Answer) -> None:
    assert answer.tokens == []
    start, found = rows_of(answer.hidden)
    assert (start, len(found)) == (0, 1)
    torch.testing.assert_close(found[0], hf_hidden(s.path, s.ids).mean(0), atol=1e-5, rtol=1e-5)


@overlap
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_pooled_prompts(shelf: EngineShelf, family: Family, overlap: bool) -> None:
    """Nothing is sampled. In chunks, of one row, as embeddings, beside an answer, and again from a warm cache."""
    harness = shelf.engine(family, async_scheduling=overlap, max_num_batched_tokens=16)
    samples = [sample(shelf.path(family), length) for length in (1, 3, 16, 37)]
    for _ in range(2):
        other = harness.add(samples[2].ids, 9)
        means = [
            (s, harness.add(prompt, 0, return_hidden_states="mean")) for s in samples for prompt in (s.ids, s.rows)
        ]
        lasts = [(s, harness.add(s.ids, 0, return_hidden_states="last")) for s in samples]
        harness.run()
        assert harness.tokens(other) == samples[2].tokens[:9]
        for s, number in means:
            assert_mean(s, harness.answer(number))
        for s, number in lasts:
            start, found = rows_of(harness.answer(number).hidden)
            assert start == len(s.ids) - 1
            torch.testing.assert_close(found, hf_hidden(s.path, s.ids)[-1:], atol=2e-5, rtol=1e-5)
            assert harness.answer(number).tokens == []


def test_a_cached_prefix_is_read_only_where_its_states_are_not_wanted(shelf: EngineShelf) -> None:
    harness = shelf.engine("llama")
    s = sample(shelf.path("llama"), 37, 3)
    harness.generate(s.ids, 4)
    for mode, cached in (("last", 32), ("answer", 32), ("all", 0)):
        answer = harness.generate(s.ids, 4, return_hidden_states=mode)
        assert answer.cached_tokens == cached
        assert_hidden(s, answer, mode)
    mean = harness.generate(s.ids, 0, return_hidden_states="mean")
    assert mean.cached_tokens == 0
    assert_mean(s, mean)
    harness.generate(sample(shelf.path("llama"), 38, 5).ids, 0, return_hidden_states="mean")
    # What it has computed is as good as any other's.
    assert harness.generate(sample(shelf.path("llama"), 38, 5).ids, 2).cached_tokens == 32


@overlap
def test_several_choices(shelf: EngineShelf, overlap: bool) -> None:
    harness = shelf.engine("llama", async_scheduling=overlap, max_num_batched_tokens=16)
    s = sample(shelf.path("llama"), 24, 1)
    for mode in MODES:
        number = harness.add(s.ids, 9, n=3, return_hidden_states=mode, temperature=1.0, seed=7)
        harness.run()
        texts = {tuple(harness.tokens(number, choice)) for choice in range(3)}
        assert len(texts) == 3
        for choice in range(3):
            assert_hidden(s, harness.answer(number, choice), mode, first_choice=choice == 0)


@overlap
@pytest.mark.parametrize("mode", MODES)
def test_states_end_with_the_answer(shelf: EngineShelf, mode: str, overlap: bool) -> None:
    """A step that was launched before the end was known adds none."""
    harness = shelf.engine("llama", async_scheduling=overlap)
    s = sample(shelf.path("llama"), 24)
    token, expected = s.stop()
    answer = harness.generate(s.ids, return_hidden_states=mode, stop_token_ids=(token,))
    assert answer.tokens == expected
    assert_hidden(s, answer, mode)


@overlap
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("made", [0, 3])
def test_a_grammar_that_ends_before_the_next_token(
    shelf: EngineShelf, mode: str, made: int, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row that was computed for a token which is never chosen is the prompt's last one, or nobody's."""
    harness = shelf.engine("llama", async_scheduling=overlap)
    s = sample(shelf.path("llama"), 24)
    grammar = json.dumps({"grammars": [{"lark_grammar": "start: /.*/"}]})
    fill = harness.engine._grammars.fill

    def fill_until(rows: list[Any], masks: Any) -> list[Any]:
        outcomes = fill(rows, masks)
        (sequence,) = harness.engine.scheduler.requests[0, number]
        known = int(harness.engine.scheduler.table.known[sequence.slot]) - len(s.ids)
        return ["stop"] if known == made else outcomes

    monkeypatch.setattr(harness.engine._grammars, "fill", fill_until)
    number = harness.add(s.ids, 9, return_hidden_states=mode, grammar=grammar)
    harness.run()
    answer = harness.answer(number)
    assert len(answer.tokens) == made
    start, found = rows_of(answer.hidden)
    computed = hf_hidden(s.path, s.ids + answer.tokens)
    expected = computed[: max(len(s.ids), len(computed) - 1)]
    begin = {"last": len(expected) - 1, "answer": len(s.ids) - 1, "all": 0}[mode]
    assert start == begin
    torch.testing.assert_close(found, expected[begin:], atol=2e-5, rtol=1e-5)


def test_an_aborted_request_sends_no_more(shelf: EngineShelf) -> None:
    harness = shelf.engine("llama", async_scheduling=True)
    s = sample(shelf.path("llama"), 24)
    number = harness.add(s.ids, 30, return_hidden_states="all")
    sent = 0

    def between(step: int) -> None:
        nonlocal sent
        if step == 5:
            harness.engine.abort((0, number))
            sent = len(harness.answer(number).hidden)

    harness.run(between)
    assert len(harness.answer(number).hidden) == sent > 0
    harness.assert_empty()


def test_many_rows_travel_in_pieces(shelf: EngineShelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.hidden.PIECE_BYTES", 10 * 64 * 4)
    monkeypatch.setattr("runner.engine.PIECE_BYTES", 10 * 64 * 4)
    harness: Harness = shelf.engine("llama")
    s = sample(shelf.path("llama"), 37)
    answer = harness.generate(s.ids, 2, return_hidden_states="all")
    assert [len(part.rows) // (64 * 4) for part in answer.hidden] == [10, 10, 10, 7, 1]
    assert_hidden(s, answer, "all")


class _Graphs:
    """Stands in for captured graphs: a replay leaves its results in the device's buffers and returns nothing."""

    def __init__(self, device: DeviceStep) -> None:
        self._device, self._launch = device, device._forward
        self.replays = 0
        device._forward = self._forward  # type: ignore[method-assign]

    def _forward(self, launched: Launched, words: int) -> None:
        self._step = launched.step
        self._launch(launched, words)

    def forward(self, size: StepSize) -> _Graphs:
        self._size = size
        return self

    def sampling(self, entries: int, asks: object) -> None:
        return None

    def replay(self) -> None:
        self.replays += 1
        self._device._forward_pass(self._size, self._step.starts.tolist(), self._step.computed.tolist())


def test_steps_replayed_from_graphs(shelf: EngineShelf) -> None:
    """A step whose states are wanted needs no other path than its neighbours'."""
    harness = Harness(shelf.path("llama"), max_num_batched_tokens=16, async_scheduling=True)
    graphs: Any = _Graphs(harness.engine.device)
    harness.engine.device._graphs = graphs
    s = sample(shelf.path("llama"), 37)
    asked = [(harness.add(s.ids, 9, return_hidden_states=mode), mode) for mode in MODES]
    mean = harness.add(s.rows, 0, return_hidden_states="mean")
    harness.run()
    assert graphs.replays == harness.engine.stats().steps
    for number, mode in asked:
        assert_hidden(s, harness.answer(number), mode)
    assert_mean(s, harness.answer(mean))
