"""Plain sequences beside such as ask for something, of several workers in one batch: nobody's wishes are another's, and
nobody gets what is another's, whether the batch stays the same for many steps or changes in every one."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from runner.messages import End, Generate, StepOutput
from tests.parity.harness import Harness, Prompt
from tests.parity.reference import Sample, sample
from tests.parity.shelf import EngineShelf

WORKERS = 3
REQUESTS = 30
LENGTHS = (3, 9, 16, 21, 33)
FORCED = 7
"""A token id that nobody says unasked as often as he is told to."""
ASKS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {},
    {"logprobs": 2},
    {"logit_bias": ((FORCED, 1000.0),)},
    {"return_hidden_states": "answer"},
)


class _SeveralWorkers(Harness):
    """Request i is worker i's, modulo their number."""

    def message(self, *args: Any, **options: Any) -> tuple[Generate, list[memoryview]]:
        message, frames = super().message(*args, **options)
        return msgspec.structs.replace(message, worker=message.request % WORKERS), frames

    def _emit(self, worker: int, output: StepOutput) -> None:
        parts: list[Any] = [*output.started, *output.ends, *output.hidden]
        assert {number % WORKERS for number in (*output.requests, *(part.request for part in parts))} <= {worker}
        super()._emit(0, output)


@dataclass
class _Asked:
    sample: Sample
    prompt: Prompt
    asks: dict[str, Any]
    max_tokens: int
    expected: list[int]
    stop: tuple[int, ...]
    arrival: int
    abort_at: int | None
    number: int = -1
    aborted: bool = False


def _random_request(generator: random.Random, shelf: EngineShelf, at_once: bool) -> _Asked:
    found = sample(shelf.path("llama"), generator.choice(LENGTHS))
    asks, max_tokens = generator.choice(ASKS), generator.choice([1, 9, 25, 32, 32])
    expected = [FORCED] * max_tokens if "logit_bias" in asks else found.tokens[:max_tokens]
    stop: tuple[int, ...] = ()
    if not asks and generator.random() < 0.4:
        token, until = found.stop()
        if len(until) < max_tokens:
            stop, expected = (token,), until
    arrival = 0 if at_once else generator.choice([0, generator.randrange(40)])
    abort_at = arrival + generator.randrange(1, 30) if generator.random() < 0.2 else None
    prompt: Prompt = found.ids if generator.random() < 0.5 else found.rows
    return _Asked(found, prompt, asks, max_tokens, expected, stop, arrival, abort_at)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_everyone_gets_his_own(shelf: EngineShelf, overlap: bool, at_once: bool, caching: bool) -> None:
    generator = random.Random(4 * overlap + 2 * at_once + caching)
    harness = _SeveralWorkers(
        shelf.path("llama"), max_model_len=72, max_num_seqs=12, max_num_batched_tokens=48, block_size=4,
        num_blocks=40, async_scheduling=overlap, enable_prefix_caching=caching,
    )  # fmt: skip
    crowd = [_random_request(generator, shelf, at_once) for _ in range(REQUESTS)]

    def between(step: int) -> None:
        for each in crowd:
            if each.arrival == step:
                each.number = harness.add(
                    each.prompt, each.max_tokens, stop_token_ids=each.stop, salt=str(caching), **each.asks
                )
            if each.abort_at == step and harness.answer(each.number).end is None:
                harness.engine.abort((each.number % WORKERS, each.number))
                harness.answer(each.number).end = End(-1, -1, "abort")  # whatever came now would come after the end
                each.aborted = True

    harness.run(between)
    assert harness.engine.stats().preemptions > 0
    harness.assert_empty()
    scheduler = harness.engine.scheduler
    assert scheduler._asking == scheduler.table._most_stop_ids == scheduler._leaving == scheduler._inspected == 0
    for each in crowd:
        answer = harness.answer(each.number)
        assert answer.end is not None
        if each.aborted:
            assert answer.tokens == each.expected[: len(answer.tokens)]
            continue
        assert answer.tokens == each.expected
        assert answer.end.reason == ("stop" if each.stop else "length")
        assert answer.end.stop_token == (each.stop[0] if each.stop else None)
        asked = [entry.token for entry in answer.logprobs if entry is not None]
        assert asked == (each.expected if "logprobs" in each.asks else [])
        rows = len(each.sample.ids)
        wanted = list(range(rows - 1, rows - 1 + each.max_tokens)) if "return_hidden_states" in each.asks else []
        assert _positions(harness, each.number) == wanted


def _positions(harness: Harness, number: int) -> list[int]:
    size = harness.engine.info.hidden_size * 4
    parts: list[NDArray[np.int64]] = [
        part.start + np.arange(len(part.rows) // size) for part in harness.answer(number).hidden
    ]
    return [int(place) for part in parts for place in part]
