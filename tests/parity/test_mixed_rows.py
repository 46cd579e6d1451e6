"""Tokens and embeddings in one prompt, at every place and in every order: answers, shared blocks, hints, preemption."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from torch import Tensor

from runner.scheduler import Scheduler
from runner.sequence import Sequence as RunnerSequence
from tests.models import Family, embed, random_prompt
from tests.parity.harness import Harness, Prompt
from tests.parity.reference import Sample, oracle, penalised, sample
from tests.parity.shelf import EngineShelf
from tests.peft_adapters import peft_generate, save_adapter

BLOCK = 8

overlap = pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])


# --- the seed failure -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("count", [4, 8])
def test_seed_failure_mixed_requests_that_decode_together(shelf: EngineShelf, family: Family, count: int) -> None:
    """The failure that this project began with: an engine whose mask of token rows was a step old took generated
    tokens for embeddings, as soon as several requests with prompt embeddings decoded together under asynchronous
    scheduling. Here they arrive while others decode, end at different steps so that the batch closes up, and answer as
    their ids do."""
    harness = shelf.engine(family, async_scheduling=True, max_num_batched_tokens=24, max_num_seqs=8)
    harness.fill_with_garbage(cache=True)
    samples = [sample(shelf.path(family), 9 + 3 * i, max_new_tokens=48) for i in range(count)]
    lengths = [48 - 2 * i for i in range(count)]
    assert min(lengths) >= 32

    def answers(prompts: Sequence[Prompt], salt: str) -> list[list[int]]:
        numbers: list[int] = []

        def between(step: int) -> None:
            while len(numbers) < count and step >= 3 * len(numbers):
                i = len(numbers)
                numbers.append(harness.add(prompts[i], lengths[i], salt=f"{count} {salt}"))

        harness.run(between)
        return [harness.tokens(number) for number in numbers]

    as_ids = answers([s.ids for s in samples], "ids")
    assert as_ids == [s.tokens[:length] for s, length in zip(samples, lengths, strict=True)]
    assert answers([s.pieces(seed=i) for i, s in enumerate(samples)], "mixed") == as_ids
    assert answers([s.rows for s in samples], "embeddings") == as_ids
    harness.assert_empty()


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "qwen3"])
def test_soft_prompts_of_scaled_embeddings(shelf: EngineShelf, family: Family, tmp_path: Path) -> None:
    """PEFT trains rows that are not scaled any more, as ours are not."""
    path = shelf.path(family)
    adapter = save_adapter(path, tmp_path / "adapter", "prompt-tuning", 9)
    (rows,) = safetensors.torch.load_file(adapter / "adapter_model.safetensors").values()
    ids = random_prompt(11, 6)
    assert shelf.engine(family).generate((rows, ids), 16).tokens == peft_generate(path, adapter, ids, 16)


# --- every place ------------------------------------------------------------------------------------------------------


def identities(prompt: Prompt) -> list[Hashable]:
    """What each row is, so that equal rows are equal."""
    found: list[Hashable] = []
    for piece in prompt if isinstance(prompt, tuple) else (prompt,):
        if isinstance(piece, Tensor):
            found += map(tuple, piece.tolist())
        elif isinstance(piece, list):
            found += piece
    return found


def common(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """Rows at the beginning that are equal."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in pairs)


@overlap
def test_segments_at_every_offset(shelf: EngineShelf, overlap: bool) -> None:
    """Runs of embeddings that begin and end at every place of a block, and cross one or two; each prompt finds exactly
    the blocks in which it is equal to an earlier one, and none in which it only looks equal."""
    harness = shelf.engine("llama", block_size=BLOCK, async_scheduling=overlap, max_num_batched_tokens=24)
    harness.fill_with_garbage(cache=True)
    s = sample(shelf.path("llama"), 29)
    cuts = [(start, start + length) for start in range(BLOCK + 1) for length in (1, BLOCK - 1, BLOCK, BLOCK + 1, 17)]
    prompts: list[Prompt] = [(s.ids[:start], s.rows[start:end], s.ids[end:]) for start, end in cuts]
    prompts.append(s.ids)
    asked: list[list[Hashable]] = []
    for prompt in prompts:
        rows = identities(prompt)
        most = max((common(rows, other) for other in asked), default=0)
        expected = min(most, len(rows) - 1) // BLOCK * BLOCK
        answer = harness.generate(prompt, 6, salt="offsets")
        assert answer.tokens == s.tokens[:6]
        assert answer.cached_tokens == expected
        asked.append(rows)
    numbers = [harness.add(prompt, 6, salt="all at once") for prompt in prompts]
    harness.run()
    assert all(harness.tokens(number) == s.tokens[:6] for number in numbers)
    harness.assert_empty()


def test_equal_rows_under_other_masks_never_share(shelf: EngineShelf) -> None:
    """The same id and the same row at every place: prompts that differ by nothing but where the embeddings are. All 16
    masks of a block, each found again by itself alone; a hint makes no difference to it."""
    harness = shelf.engine("llama", block_size=4)
    harness.fill_with_garbage(cache=True)
    path = shelf.path("llama")
    samples = (oracle(path, [token] * 5, 4) for token in range(10, 60))
    s = next(found for found in samples if found is not None)
    row = embed(path, s.ids[:1])
    masks = list(itertools.product([False, True], repeat=4))
    prompts: list[Prompt] = [(*(row if is_row else s.ids[:1] for is_row in mask), s.ids[:1]) for mask in masks]
    for cached in (0, 4):
        for prompt, mask in zip(prompts, masks, strict=True):
            hints = [7] * sum(mask) if cached else None
            answer = harness.generate(prompt, 4, salt="masks", hints=hints)
            assert answer.tokens == s.tokens
            assert answer.cached_tokens == cached


# --- preemption -------------------------------------------------------------------------------------------------------

PENALTY = 0.25
"""Below 1, so that tokens of the prompt come up."""


@dataclass
class _Asked:
    prompt: Prompt
    expected: list[int]
    options: dict[str, Any] = field(default_factory=dict)


def _of_each_kind(shelf: EngineShelf, length: int) -> dict[str, _Asked]:
    """One request of each kind; the last two count their prompt, with and without hints."""
    path = shelf.path("llama")
    s = sample(path, length)
    half = length // 2
    asked = {
        "ids": _Asked(s.ids, s.tokens),
        "embeddings": _Asked(s.rows, s.tokens),
        "mixed": _Asked(s.pieces(seed=length), s.tokens),
    }
    for seed in range(50):
        ids = random_prompt(length, 10_000 + seed)
        prompt: Prompt = (ids[:half], embed(path, ids[half:]))
        unhinted = penalised(path, ids, ids[:half], PENALTY, 24)
        hinted = penalised(path, ids, ids, PENALTY, 24)
        if unhinted is not None and hinted is not None and hinted != unhinted:
            options: dict[str, Any] = {"repetition_penalty": PENALTY}
            asked["penalised"] = _Asked(prompt, unhinted, options)
            asked["hinted"] = _Asked(prompt, hinted, {**options, "hints": ids[half:]})
            return asked
    raise AssertionError("no prompt in fifty whose answers differ by what is counted")


@overlap
def test_each_kind_is_preempted(shelf: EngineShelf, monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    """A pool for little more than one of them: each kind loses its blocks while it runs, at least once, and its answer
    is none the worse. Hints come back into the slot with the rest."""
    harness = shelf.engine(
        "llama", block_size=4, num_blocks=28, max_model_len=72, async_scheduling=overlap, max_num_batched_tokens=16
    )
    harness.fill_with_garbage(cache=True)
    preempted = _watch_preemptions(harness, monkeypatch)
    seen = set()
    kinds = _of_each_kind(shelf, 22)
    for names in (list(kinds), list(reversed(kinds))):  # the newest is preempted, so the first one never is
        numbers = {name: harness.add(kinds[name].prompt, len(kinds[name].expected), **kinds[name].options)
                   for name in names}  # fmt: skip
        harness.run()
        for name, number in numbers.items():
            assert harness.tokens(number) == kinds[name].expected, name
            if number in preempted:
                seen.add(name)
    assert seen == set(kinds)
    harness.assert_empty()


def _watch_preemptions(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The numbers of requests that were preempted."""
    seen: set[int] = set()
    real = Scheduler._give_back

    def give_back(self: Scheduler, sequence: RunnerSequence) -> None:
        if not sequence.ended:
            seen.add(sequence.request.key[1])
        real(self, sequence)

    monkeypatch.setattr(Scheduler, "_give_back", give_back)
    return seen


# --- hints ------------------------------------------------------------------------------------------------------------


@overlap
def test_hints_of_many_at_once(shelf: EngineShelf, overlap: bool) -> None:
    """Chunked, in one batch with the same prompts unhinted and with others that are not penalised; no hint strays into
    another's slot, nor stays behind in it."""
    harness = shelf.engine("llama", async_scheduling=overlap, max_num_batched_tokens=12, max_num_seqs=4)
    harness.fill_with_garbage(cache=True)
    plain = sample(shelf.path("llama"), 22)
    numbers = []
    for _ in range(2):
        for name, asked in _of_each_kind(shelf, 22).items():
            number = harness.add(asked.prompt, len(asked.expected), salt="hints", **asked.options)
            numbers.append((name, number, asked.expected))
        numbers.append(("plain", harness.add(plain.rows, salt="hints", hints=plain.ids), plain.tokens))
    harness.run()
    for name, number, expected in numbers:
        assert harness.tokens(number) == expected, name


def test_prompt_logprobs_at_hinted_rows(shelf: EngineShelf) -> None:
    """In chunks; scored for what the client says, where it says it."""
    harness = shelf.engine("llama", max_num_batched_tokens=8, async_scheduling=True)
    s: Sample = sample(shelf.path("llama"), 24)
    hints: list[int | None] = [*s.ids[6:10], None, 5, None]
    prompt = (s.ids[:6], s.rows[6:13], s.ids[13:])
    answer = harness.generate(prompt, 4, prompt_logprobs=0, hints=hints)
    unhinted = harness.generate(s.ids, 4, prompt_logprobs=0)
    told = [None if entry is None else entry.token for entry in answer.prompt_logprobs]
    assert told == [*s.ids[1:6], *hints, *s.ids[13:]]
    for mine, theirs in zip(answer.prompt_logprobs, unhinted.prompt_logprobs, strict=True):
        if mine is not None and theirs is not None and mine.token == theirs.token:
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
