"""Crowds of random requests in pools that are far too small, some of them aborted at random."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from runner.messages import End
from tests.models import FAMILIES, Family
from tests.parity.harness import Harness, Prompt
from tests.parity.reference import Sample, sample
from tests.parity.shelf import EngineShelf

REQUESTS = 40
SAMPLES = ((3, 0), (9, 0), (16, 0), (21, 0), (33, 0), (16, 1))
"""(length, seed). Few, so that requests have prefixes in common."""

_ABORTED = End(-1, -1, "abort")


@dataclass
class _Asked:
    sample: Sample
    n: int
    expected: list[int]
    arrival: int
    abort_at: int | None
    """The step before which it is aborted, if it has not ended by then."""
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    prompt: Prompt
    salt: str
    number: int = -1


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        count = 60 if metafunc.config.getoption("--long") else 4
        metafunc.parametrize("seed", range(count))


def test_crowd(shelf: EngineShelf, seed: int) -> None:
    generator = random.Random(seed)
    family: Family = FAMILIES[seed % len(FAMILIES)]
    harness = shelf.engine(
        family,
        max_model_len=72,
        max_num_seqs=generator.choice([6, 12, 32]),
        max_num_batched_tokens=generator.choice([32, 48]),
        block_size=4,
        num_blocks=generator.choice([19, 40]),
        async_scheduling=generator.random() < 0.75,
        enable_prefix_caching=generator.random() < 0.75,
    )
    harness.fill_with_garbage(cache=True)
    preemptions = harness.engine.stats().preemptions
    salts = [f"{seed} {i}" for i in range(2)]
    asked = [_random_request(generator, shelf, family, salts) for _ in range(REQUESTS)]

    def between(step: int) -> None:
        for request in asked:
            if request.number < 0 and request.arrival <= step:
                request.number = harness.add(
                    request.prompt,
                    request.max_tokens,
                    n=request.n,
                    stop_token_ids=request.stop_token_ids,
                    salt=request.salt,
                )
            if request.abort_at is not None and request.abort_at == step:
                _abort(harness, request)

    harness.run(between)
    for request in asked:
        _check(harness, request)
    assert harness.engine.stats().preemptions > preemptions
    harness.assert_empty()


def _random_request(generator: random.Random, shelf: EngineShelf, family: Family, salts: list[str]) -> _Asked:
    length, seed = generator.choice(SAMPLES)
    s = sample(shelf.path(family), length, seed)
    arrival = generator.choice([0, 0, generator.randrange(60)])
    max_tokens = generator.choice([1, 8, 20, 32])
    expected = s.tokens[:max_tokens]
    stop_ids: tuple[int, ...] = ()
    if generator.random() < 0.3:
        stop_ids, expected = _stopped(generator, expected)
    prompt = generator.choice([s.ids, s.rows, s.pieces(generator.randrange(3))])
    return _Asked(
        sample=s,
        n=generator.choice([1, 1, 1, 3]),
        expected=expected,
        arrival=arrival,
        abort_at=arrival + generator.randrange(40) if generator.random() < 0.25 else None,
        max_tokens=max_tokens,
        stop_token_ids=stop_ids,
        prompt=prompt,
        salt=generator.choice(salts),
    )


def _stopped(generator: random.Random, tokens: list[int]) -> tuple[tuple[int, ...], list[int]]:
    token = generator.choice(tokens)
    return (token,), tokens[: tokens.index(token) + 1]


def _abort(harness: Harness, request: _Asked) -> None:
    """It never says anything again."""
    key = (0, request.number)
    choices = [s.choice for s in harness.engine.scheduler.requests.get(key, ())]
    harness.engine.abort(key)
    assert key not in harness.engine.scheduler.requests
    for choice in choices:
        answer = harness.answer(request.number, choice)
        assert answer.end is None
        assert answer.tokens == request.expected[: len(answer.tokens)]
        # Whatever came now would be "a token after the end".
        answer.end = _ABORTED


def _check(harness: Harness, request: _Asked) -> None:
    for choice in range(request.n):
        answer = harness.answer(request.number, choice)
        assert answer.end is not None
        if answer.end is not _ABORTED:
            assert answer.tokens == request.expected
            assert answer.end.reason == ("stop" if request.stop_token_ids else "length")
