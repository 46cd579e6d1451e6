"""A small fixed set of parity trials that together notice every known way to break the engine.

`test_mutations` breaks the product in these ways, one at a time, and demands that a trial fails. Each trial takes a
shelf of engines and raises where an answer is not the oracle's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

from tests.models import embed, hf_logits, random_prompt
from tests.parity.harness import Harness, Prompt
from tests.parity.reference import Sample, oracle, sample
from tests.parity.scenario import Scenario, check
from tests.parity.shelf import EngineShelf

Trial = Callable[[EngineShelf], None]


def embeds_decoding_together(shelf: EngineShelf) -> None:
    """Eight prompts of embeddings, at once, nobody admitted later: after the first step only decodes."""
    for family in ("llama", "gemma3"):
        harness = shelf.engine(family, max_num_batched_tokens=256, async_scheduling=True)
        harness.fill_with_garbage(cache=True)
        samples = [sample(shelf.path(family), length, seed=5) for length in (7, 12, 15, 23)]
        _expect_at_once(harness, [(s.rows, s) for s in samples])


def crowd_of_both_kinds(shelf: EngineShelf) -> None:
    check(Scenario("llama", "both", overlap=True, chunked=True, tiny_pool=True, cache="cold", batch=8), shelf)


def crowd_of_mixed_rows(shelf: EngineShelf) -> None:
    check(Scenario("qwen3", "mixed", overlap=True, chunked=True, tiny_pool=False, cache="cold", batch=8), shelf)


def second_time(shelf: EngineShelf) -> None:
    """Prompts that were asked before, in a pool that is too small to keep them all."""
    for kind in ("ids", "embeds"):
        check(Scenario("llama", kind, overlap=True, chunked=False, tiny_pool=True, cache="warm", batch=8), shelf)


def whole_prompt_cached(shelf: EngineShelf) -> None:
    """A prompt of whole blocks, all of them cached."""
    harness = shelf.engine("llama", block_size=4, async_scheduling=True)
    harness.fill_with_garbage(cache=True)
    s = sample(shelf.path("llama"), 16)
    for _ in range(2):
        _expect_at_once(harness, [(s.ids, s), (s.rows, s)])


def conversations_that_go_on(shelf: EngineShelf) -> None:
    """Second turns, whose prompts are first turns and their answers. The answers' last rows complete a block while
    others are waiting for one."""
    harness = shelf.engine("llama", block_size=4, num_blocks=73, max_model_len=72, async_scheduling=True)
    harness.fill_with_garbage(cache=True)
    first, second = _conversations(shelf.path("llama"))
    numbers = [harness.add(s.ids, len(s.tokens)) for s in first]
    harness.run()
    assert [harness.tokens(number) for number in numbers] == [s.tokens for s in first]
    # Newest blocks first, before they are evicted.
    for s in reversed(second):
        answer = harness.generate(s.ids, 8)
        assert answer.tokens == s.tokens
        assert answer.cached_tokens > 0


def same_rows_elsewhere(shelf: EngineShelf) -> None:
    """Two prompts with the same ids at token rows and the same embeddings, which stand at other places."""
    harness = shelf.engine("llama", block_size=4, async_scheduling=True)
    harness.fill_with_garbage(cache=True)
    path = shelf.path("llama")
    ids = random_prompt(12, seed=8)
    row = embed(path, ids[:1])
    # Token 0 is what stands in for an embedding's id where ids are clamped.
    before, after = [*ids[:1], 0, *ids[2:]], [0, ids[0], *ids[2:]]
    _expect_at_once(harness, [((row, [0], ids[2:]), _oracle(path, before))])
    _expect_at_once(harness, [(([0], row, ids[2:]), _oracle(path, after))])


def same_shape_other_rows(shelf: EngineShelf) -> None:
    """Embeddings of equal length and different content, from the first row on or later, one after the other and all
    together."""
    harness = shelf.engine("llama", block_size=4, async_scheduling=True)
    harness.fill_with_garbage(cache=True)
    path = shelf.path("llama")
    samples = [sample(path, 15, seed) for seed in range(2)]
    samples.append(_oracle(path, samples[0].ids[:4] + samples[1].ids[4:]))
    for s in samples:
        _expect_at_once(harness, [(s.rows, s)])
    _expect_at_once(harness, [(s.rows, s) for s in samples])


def same_block_other_prefix(shelf: EngineShelf) -> None:
    """A prompt that begins with another's second block."""
    harness = shelf.engine("llama", block_size=4, async_scheduling=True)
    harness.fill_with_garbage(cache=True)
    s = sample(shelf.path("llama"), 15)
    _expect_at_once(harness, [(s.ids, s)])
    rest = s.ids[4:]
    _expect_at_once(harness, [(rest, _oracle(shelf.path("llama"), rest))])


def strangers(shelf: EngineShelf) -> None:
    """Requests with different salts see nothing of each other, not even by what is cached."""
    harness = shelf.engine("llama", block_size=4, async_scheduling=True)
    harness.fill_with_garbage(cache=True)
    s = sample(shelf.path("llama"), 15)
    for salt in ("alice", "bob"):
        answer = harness.generate(s.ids, 4, salt=salt)
        assert answer.tokens == s.tokens[:4] and answer.cached_tokens == 0


def scored_prompt(shelf: EngineShelf) -> None:
    """Log-probabilities of a prompt with embedding rows, in chunks."""
    harness = shelf.engine("llama", max_num_batched_tokens=8, async_scheduling=True)
    harness.fill_with_garbage(cache=True)
    s = sample(shelf.path("llama"), 24)
    answer = harness.generate((s.ids[:6], s.rows[6:13], s.ids[13:]), 4, prompt_logprobs=0)
    expected = hf_logits(shelf.path("llama"), s.ids).log_softmax(-1)
    assert answer.tokens == s.tokens[:4]
    assert answer.prompt_positions == list(range(1, 24))
    for position, entry in zip(answer.prompt_positions, answer.prompt_logprobs, strict=True):
        assert (entry is None) == (6 <= position < 13)
        if entry is not None:
            assert entry.token == s.ids[position]
            assert abs(entry.logprob - float(expected[position - 1, entry.token])) < 1e-4


def penalised(shelf: EngineShelf) -> None:
    """A penalty that forbids repetition outright, after a prompt of embeddings."""
    harness = shelf.engine("llama", async_scheduling=True)
    harness.fill_with_garbage(cache=True)
    s = sample(shelf.path("llama"), 24)
    tokens = harness.generate(s.rows, 32, presence_penalty=2.0, repetition_penalty=1e9).tokens
    assert len(set(tokens)) == 32


TRIALS: tuple[Trial, ...] = (
    embeds_decoding_together,
    whole_prompt_cached,
    same_rows_elsewhere,
    same_shape_other_rows,
    same_block_other_prefix,
    strangers,
    scored_prompt,
    penalised,
    conversations_that_go_on,
    crowd_of_both_kinds,
    crowd_of_mixed_rows,
    second_time,
)


def _expect_at_once(harness: Harness, asked: list[tuple[Prompt, Sample]]) -> None:
    numbers = [harness.add(prompt, len(s.tokens)) for prompt, s in asked]
    harness.run()
    for number, (_, s) in zip(numbers, asked, strict=True):
        assert harness.tokens(number) == s.tokens
    harness.assert_empty()


def _oracle(path: Path, ids: list[int]) -> Sample:
    found = oracle(path, ids)
    assert found is not None, "a near tie: choose another prompt"
    return found


@cache
def _conversations(path: Path) -> tuple[list[Sample], list[Sample]]:
    """First and second turns of several conversations. The row before an answer's last token completes a block of 4."""
    first, second = [], []
    for length in (5, 6, 7, 8, 9, 10, 11, 12):
        s = sample(path, length, seed=9)
        max_tokens = 25 - length % 4
        s = Sample(path, s.ids, s.tokens[:max_tokens])
        assert (length + max_tokens - 1) % 4 == 0
        turns = (oracle(path, s.ids + s.tokens + random_prompt(3, seed), 8) for seed in range(10))
        first.append(s)
        second.append(next(turn for turn in turns if turn is not None))
    return first, second
