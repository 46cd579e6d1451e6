"""Look-ups of rows by the engine client, and hidden states that it hands out, against a runner that the test plays."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from runner.messages import Accepted, End, Failed, HiddenRows, LookUp, Rejected, RejectReason, SamplingParams, TokenRows
from server.engine_client import EngineClient
from server.errors import APIError, EngineFailed, InvalidRequest, QueueFull, Unavailable
from tests.server.played_runner import PROMPT, Runner, play, settle
from tests.server.reading import all_events


async def asked(runner: Runner) -> tuple[LookUp, list[int]]:
    message, (frame,) = await runner.receive()
    assert isinstance(message, LookUp)
    return message, np.frombuffer(frame, np.int32).tolist()


def test_several_at_once() -> None:
    async def scenario(engine: EngineClient, runner: Runner) -> None:
        first = asyncio.create_task(engine.token_rows([1, 2, 3]))
        message, ids = await asked(runner)
        second = asyncio.create_task(engine.token_rows([4]))
        other, others = await asked(runner)
        assert (ids, others) == ([1, 2, 3], [4])
        runner.send(TokenRows(message.request, b"a", False))
        runner.send(TokenRows(other.request, b"x", True))
        runner.send(TokenRows(message.request, b"b", True))
        runner.send(TokenRows(message.request, b"too late", True))
        runner.send(TokenRows(999, b"nobody's", True))
        assert await first == [b"a", b"b"]
        assert await second == [b"x"]

    play(scenario)


@pytest.mark.parametrize(("reason", "error"), [("queue_full", QueueFull), ("invalid", InvalidRequest)])
def test_rejected(reason: RejectReason, error: type[APIError]) -> None:
    async def scenario(engine: EngineClient, runner: Runner) -> None:
        task = asyncio.create_task(engine.token_rows([1]))
        message, _ = await asked(runner)
        runner.send(Rejected(message.request, reason, "no"))
        with pytest.raises(error):
            await task

    play(scenario)


def test_a_runner_that_dies_or_says_nothing() -> None:
    async def scenario(engine: EngineClient, runner: Runner) -> None:
        silent = asyncio.create_task(engine.token_rows([1]))
        await asked(runner)
        with pytest.raises(Unavailable):
            await silent
        engine._live_seconds = 60
        cancelled = asyncio.create_task(engine.token_rows([1]))
        await asked(runner)
        cancelled.cancel()
        task = asyncio.create_task(engine.token_rows([1]))
        await asked(runner)
        runner.send(Failed("it died"))
        with pytest.raises(EngineFailed):
            await task
        with pytest.raises(EngineFailed):
            await engine.token_rows([1])

    play(scenario, live_seconds=0.5)


def test_hidden_states_come_with_the_tokens() -> None:
    """What a slow reader has not taken is merged; what comes after a choice's end is dropped."""

    async def scenario(engine: EngineClient, runner: Runner) -> None:
        opening = asyncio.create_task(
            engine.generate(PROMPT, SamplingParams(max_tokens=3, return_hidden_states="answer"), 2)
        )
        message, _ = await runner.receive()
        assert not isinstance(message, LookUp)
        number = message.request  # type: ignore[union-attr]
        runner.send(Accepted(number))
        stream = await opening
        runner.step([], [], hidden=[HiddenRows(number, 0, 2, b"early"), HiddenRows(number, 1, 2, b"other")])
        runner.step([number], [7], hidden=[HiddenRows(number, 0, 3, b"with it"), HiddenRows(999, 0, 3, b"nobody's")])
        runner.step([], [], ends=[End(number, 0, "length")])
        runner.step([], [], hidden=[HiddenRows(number, 0, 4, b"too late")], ends=[End(number, 1, "length")])
        await settle(engine, runner)
        events = await all_events(stream)
        assert [(event.choice, event.tokens) for event in events] == [(0, [7]), (1, [])]
        assert [[rows.rows for rows in event.hidden] for event in events] == [[b"early", b"with it"], [b"other"]]

    play(scenario)
