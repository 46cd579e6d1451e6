"""One cell of the parity matrix: what is sent, how the engine is set up, and what must come back."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields
from typing import Literal

from tests.models import Family
from tests.parity.harness import Harness, Prompt
from tests.parity.reference import Sample, sample
from tests.parity.shelf import EngineShelf

Kind = Literal["ids", "embeds", "both", "mixed"]

LENGTHS = (24, 5, 17, 1, 37, 16, 31, 12)
"""Of the prompts of a batch: one row, less than a block, whole blocks, more than three chunks."""
ARRIVALS = (0, 0, 0, 0, 0, 3, 7, 12)
"""The step before which each is added."""
STOPPED = (1, 5)
"""These have a stop token, which comes up near the middle of their answer."""
SHORT = {2: 11, 6: 1}
"""These have so many tokens, the others `MAX_TOKENS`."""
MAX_TOKENS = 32
CHUNK = 12
"""The token budget where prompts are to be chunked: less than most prompts, at least one row for each slot."""

_salts = itertools.count()


@dataclass(frozen=True)
class Scenario:
    family: Family
    kind: Kind
    """"both": some prompts as ids and some as embeddings. "mixed": both kinds of row within each prompt."""
    overlap: bool
    """Asynchronous scheduling."""
    chunked: bool
    """Prompts are computed in chunks, and there are fewer slots than requests."""
    tiny_pool: bool
    """Just the blocks that one request needs at most, so that running ones are preempted all the time."""
    cache: Literal["off", "cold", "warm"]
    """"warm": the same prompts have been run before. "off": no prefix caching."""
    batch: int

    def __str__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        flags = {True: "{}", False: "no_{}"}
        return "-".join(flags[v].format(k) if isinstance(v, bool) else f"{k}={v}" for k, v in values.items())


@dataclass(frozen=True)
class _Asked:
    """A request and what must come of it."""

    prompt: Prompt
    arrival: int
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    expected: list[int]

    @property
    def reason(self) -> str:
        return "stop" if self.stop_token_ids else "length"


def check(scenario: Scenario, shelf: EngineShelf) -> None:
    """Runs it and asserts that every answer is the oracle's, and that what the scenario is about did happen."""
    harness = shelf.engine(
        scenario.family,
        max_model_len=72,
        async_scheduling=scenario.overlap,
        max_num_seqs=5 if scenario.chunked else 8,
        max_num_batched_tokens=CHUNK if scenario.chunked else 256,
        block_size=4 if scenario.tiny_pool else 16,
        num_blocks=72 // 4 + 1 if scenario.tiny_pool else None,
        enable_prefix_caching=scenario.cache != "off",
    )
    harness.fill_with_garbage(cache=True)
    asked = _requests(scenario, shelf)
    salt = f"scenario {next(_salts)}"  # Cold to what other scenarios left in the cache.
    if scenario.cache == "warm":
        for request in reversed(asked):  # The first one's blocks are then the last to be evicted.
            harness.generate(request.prompt, 2, salt=salt)
        harness.fill_with_garbage(cache=False)
    preemptions = harness.engine.stats().preemptions
    _run(harness, asked, salt, warm=scenario.cache == "warm")
    if scenario.tiny_pool:
        assert harness.engine.stats().preemptions > preemptions
    harness.assert_empty()


def _requests(scenario: Scenario, shelf: EngineShelf) -> list[_Asked]:
    path = shelf.path(scenario.family)
    samples = [sample(path, length) for length in LENGTHS[: scenario.batch]]
    asked = [_request(scenario, i, s) for i, s in enumerate(samples)]
    if scenario.batch == 1:
        if scenario.kind == "both":
            asked.append(_Asked(samples[0].rows, 0, MAX_TOKENS, (), samples[0].tokens))
        if scenario.tiny_pool:
            # Alone it has all the blocks that it can ever want. An older one takes them away again and again.
            older = sample(path, LENGTHS[4])
            asked.insert(0, _Asked(older.ids, 0, MAX_TOKENS, (), older.tokens))
    return asked


def _request(scenario: Scenario, i: int, s: Sample) -> _Asked:
    prompt: Prompt = s.ids
    if scenario.kind == "embeds" or (scenario.kind == "both" and i % 2):
        prompt = s.rows
    elif scenario.kind == "mixed":
        prompt = s.pieces(seed=i)
    if i in STOPPED:
        stop, expected = s.stop()
        return _Asked(prompt, ARRIVALS[i], MAX_TOKENS, (stop,), expected)
    max_tokens = SHORT.get(i, MAX_TOKENS)
    return _Asked(prompt, ARRIVALS[i], max_tokens, (), s.tokens[:max_tokens])


def _run(harness: Harness, asked: list[_Asked], salt: str, *, warm: bool) -> None:
    numbers: dict[int, int] = {}
    steps = 0

    def between(step: int) -> None:
        nonlocal steps
        steps = step
        for i, request in enumerate(asked):
            if i not in numbers and request.arrival <= step:
                numbers[i] = harness.add(
                    request.prompt, request.max_tokens, stop_token_ids=request.stop_token_ids, salt=salt
                )

    harness.run(between)
    assert len(numbers) == len(asked) and steps > max(request.arrival for request in asked)
    cached = 0
    for i, request in enumerate(asked):
        answer = harness.answer(numbers[i])
        assert answer.tokens == request.expected, f"request {i} of {len(asked)}"
        assert answer.end is not None and answer.end.reason == request.reason
        assert answer.end.stop_token == (request.expected[-1] if request.stop_token_ids else None)
        cached += answer.cached_tokens
    assert (cached > 0) == warm
