"""The conversation with the runner, against a runner that the test itself plays."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from runner.messages import (
    Abort,
    AbortAnswer,
    Aborted,
    Accepted,
    End,
    Failed,
    Generate,
    GetTurns,
    Heartbeat,
    Loading,
    PromptLogprobs,
    Ready,
    Rejected,
    Reply,
    Span,
    Started,
    Stats,
    StepOutput,
    TokenLogprobs,
    decode_to_runner,
    encode,
)
from server.engine_client import EngineClient
from server.errors import APIError, EngineFailed, InvalidRequest, QueueFull, RequestAborted, Unavailable
from server.generation import ChoiceEvent
from server.prompt import PromptRows
from server.request_context import RequestContext, current_request
from tests.server.played_runner import MODEL, PARAMS, PROMPT, Runner, play, settle, submit, until
from tests.server.reading import all_events, next_event, next_tokens

# --- the greeting -----------------------------------------------------------------------------------------------------


def test_greets_until_it_is_answered_and_then_waits() -> None:
    async def scenario(engine: EngineClient, runner: Runner) -> None:
        first = await runner.hello()  # The second one: nobody has answered yet.
        runner.send(Loading("weights"))
        await until(lambda: engine.stage == "weights")
        await asyncio.sleep(0.5)  # and what was sent before that has come
        while runner.inbox.poll(0):
            runner.inbox.recv()
        await asyncio.sleep(0.5)
        assert not runner.inbox.poll(0)
        assert engine.stage == "weights"
        assert engine.model is None
        with pytest.raises(Unavailable):
            await engine.generate(PROMPT, PARAMS)
        assert first.address.startswith("ipc://")
        runner.send(Ready(MODEL))
        assert await engine.wait_ready() == MODEL

    play(scenario, ready=False)


def test_a_failure_to_load() -> None:
    async def scenario(engine: EngineClient, runner: Runner) -> None:
        runner.send(Failed("too large"))
        with pytest.raises(EngineFailed):
            await engine.wait_ready()
        await engine.wait_failed()
        with pytest.raises(EngineFailed):
            await engine.generate(PROMPT, PARAMS)

    assert play(scenario, ready=False).failure is not None


def test_heartbeats_carry_the_stats() -> None:
    async def scenario(engine: EngineClient, runner: Runner) -> None:
        before = engine.last_heartbeat
        runner.send(Heartbeat(Stats(running=3)))
        await until(lambda: engine.stats.running == 3)
        assert engine.last_heartbeat > before

    play(scenario)


# --- requests ---------------------------------------------------------------------------------------------------------


def test_a_request_goes_out_with_its_frames() -> None:
    rows = np.arange(16, dtype=np.float32)
    prompt = PromptRows(np.array([1, -1, -1, 2], dtype=np.int32), (Span(1, 2),), bytes(range(32)), (rows.tobytes(),))

    async def scenario(engine: EngineClient, runner: Runner) -> None:
        task = asyncio.create_task(engine.generate(prompt, PARAMS, 2, "salt"))
        message, frames = await runner.receive()
        assert isinstance(message, Generate)
        assert (message.n, message.sampling, message.spans, message.cache_salt) == (2, PARAMS, (Span(1, 2),), "salt")
        assert np.frombuffer(frames[0], dtype=np.int32).tolist() == [1, -1, -1, 2]
        assert frames[1] == bytes(range(32))
        assert frames[2] == rows.tobytes()
        assert len(frames) == 3
        assert not task.done()
        runner.send(Accepted(message.request))
        await task

    play(scenario)


def test_events_of_a_request() -> None:
    entry = TokenLogprobs(7, -1.0, 1, (7,), (-1.0,))

    async def scenario(engine: EngineClient, runner: Runner) -> None:
        stream, request = await submit(engine, runner)
        prompt_logprobs = PromptLogprobs(request, 1, (None, entry))
        started = Started(request, 0, 2, 0.5)
        runner.step([request], [7], logprobs=[entry], started=[started], prompt_logprobs=[prompt_logprobs])
        assert await next_event(stream) == ChoiceEvent(0, [7], [entry], started, [prompt_logprobs])
        end = End(request, 0, "stop", 8)
        runner.step([request], [8], logprobs=[entry], ends=[end])
        assert await next_event(stream) == ChoiceEvent(0, [8], [entry], end=end)
        assert engine.num_requests == 0
        assert await next_event(stream) is None
        stream.abort()
        assert await runner.idle()  # No abort for what has ended.

    play(scenario)


def test_output_may_overtake_the_acceptance() -> None:
    async def scenario(engine: EngineClient, runner: Runner) -> None:
        task = asyncio.create_task(engine.generate(PROMPT, PARAMS))
        message, _ = await runner.receive()
        assert isinstance(message, Generate)
        runner.step([message.request], [4])
        assert await next_tokens(await task) == [4]

    play(scenario)


def test_tokens_that_a_reader_takes_directly() -> None:
    taken: list[int] = []

    def direct(token: int) -> bool:
        taken.append(token)
        return token < 10

    async def scenario(engine: EngineClient, runner: Runner) -> None:
        stream, request = await submit(engine, runner)
        news = []
        stream.listen(lambda: news.append(1))
        runner.step([request], [1])
        await settle(engine, runner)
        stream.take_directly(direct)
        assert taken == [], "there was something to take"
        assert stream.take() == ChoiceEvent(0, [1])
        stream.take_directly(direct)
        for tokens in ([2], [3], [11], [4]):
            runner.step([request], tokens)
        await settle(engine, runner)
        assert taken == [2, 3, 11]
        assert stream.take() == ChoiceEvent(0, [11, 4])
        assert len(news) == 2
        stream.take_directly(direct)
        # Its last token may be one that is not to be seen.
        runner.step([request], [5], ends=[End(request, 0, "stop", 5)])
        await settle(engine, runner)
        assert stream.take() == ChoiceEvent(0, [5], end=End(request, 0, "stop", 5))
        assert taken == [2, 3, 11]
        assert engine.metrics.generation_tokens.value == 6
        several, request = await submit(engine, runner, n=2)
        several.take_directly(direct)
        runner.step([request], [6])
        assert await next_tokens(several) == [6]

    play(scenario)


def test_a_slow_reader_finds_its_tokens_merged() -> None:
    async def scenario(engine: EngineClient, runner: Runner) -> None:
        stream, request = await submit(engine, runner, n=2)
        for token in range(5):
            runner.step([request, request], [token, 10 + token], [0, 1])
        runner.step([], [], ends=[End(request, 1, "length")])
        await settle(engine, runner)
        assert await next_event(stream) == ChoiceEvent(0, [0, 1, 2, 3, 4])
        assert await next_event(stream) == ChoiceEvent(1, [10, 11, 12, 13, 14], end=End(request, 1, "length"))
        runner.step([request], [5], ends=[End(request, 0, "length")])
        assert await all_events(stream) == [ChoiceEvent(0, [5], end=End(request, 0, "length"))]

    play(scenario)


@pytest.mark.parametrize(
    ("reason", "error"), [("queue_full", QueueFull), ("rows_full", QueueFull), ("invalid", InvalidRequest)]
)
def test_a_rejection(reason: Any, error: type[APIError]) -> None:
    async def scenario(engine: EngineClient, runner: Runner) -> None:
        task = asyncio.create_task(engine.generate(PROMPT, PARAMS))
        message, _ = await runner.receive()
        assert isinstance(message, Generate)
        runner.send(Rejected(message.request, reason, "because"))
        with pytest.raises(error, match="because"):
            await task
        assert engine.num_requests == 0
        assert engine.metrics.rejected.values() == {reason: 1}
        assert sum(engine.metrics.finished.values().values()) == 0
        assert await runner.idle()

    play(scenario)


def test_an_answer_for_a_request_that_is_gone_is_dropped() -> None:
    async def scenario(engine: EngineClient, runner: Runner) -> None:
        stream, request = await submit(engine, runner)
        stream.abort()
        assert await next_abort(runner) == (request, -1)
        runner.send(Accepted(request))
        runner.send(Rejected(request, "invalid", ""))
        runner.step([request], [1], started=[Started(request, 0, 0, 0.0)], ends=[End(request, 0, "stop")])
        await settle(engine, runner)
        other, number = await submit(engine, runner)
        runner.step([number], [2])
        assert await next_tokens(other) == [2]

    play(scenario)


# --- aborts -----------------------------------------------------------------------------------------------------------


async def next_abort(runner: Runner) -> tuple[int, int]:
    message, _ = await runner.receive()
    assert isinstance(message, Abort)
    return message.request, message.choice


def test_abort_of_one_choice() -> None:
    async def scenario(engine: EngineClient, runner: Runner) -> None:
        stream, request = await submit(engine, runner, n=2)
        runner.step([request, request], [1, 2], [0, 1])
        await settle(engine, runner)
        stream.abort(0)
        assert await next_abort(runner) == (request, 0)
        assert await next_event(stream) == ChoiceEvent(1, [2])  # What was ready of choice 0 has gone with it.
        runner.step([request, request], [1, 2], [0, 1], ends=[End(request, 1, "length")])
        assert await all_events(stream) == [ChoiceEvent(1, [2], end=End(request, 1, "length"))]
        assert engine.num_requests == 0
        assert engine.metrics.finished["length"].value == 1
        stream.abort(0)
        assert await runner.idle()

    play(scenario)


def test_abort_of_the_last_choice_counts_as_a_stop() -> None:
    async def scenario(engine: EngineClient, runner: Runner) -> None:
        stream, request = await submit(engine, runner)
        stream.abort(0)
        assert await next_abort(runner) == (request, -1)
        assert engine.metrics.finished.values() == {"stop": 1}
        assert await all_events(stream) == []

    play(scenario)


def test_closing_aborts_once() -> None:
    async def scenario(engine: EngineClient, runner: Runner) -> None:
        stream, request = await submit(engine, runner, n=3)
        stream.abort()
        stream.abort()
        assert await next_abort(runner) == (request, -1)
        assert await runner.idle()
        assert engine.num_requests == 0
        assert engine.metrics.finished["abort"].value == 1

    play(scenario)


def test_an_answer_that_a_client_ends() -> None:
    async def scenario(engine: EngineClient, runner: Runner) -> None:
        context = RequestContext("req-1", api_key=3)
        context.answer_id = "cmpl-1"
        token = current_request.set(context)
        task = asyncio.create_task(engine.generate(PROMPT, PARAMS, 2))
        message = await runner.accept()
        assert (message.answer, message.client) == ("cmpl-1", 3)
        stream = await task
        asking = asyncio.create_task(engine.abort_answer("cmpl-1"))
        question, _ = await runner.receive()
        assert question == AbortAnswer(0, 1, 3, "cmpl-1")
        runner.step([message.request], [7], [1])
        runner.send(Aborted(message.request))
        runner.step([message.request], [8], [1], ends=[End(message.request, 0, "length")])  # was under way
        runner.send(Aborted(message.request))
        runner.send(Reply(question.request))
        assert await asking
        assert await next_tokens(stream) == [7]
        with pytest.raises(RequestAborted):
            await next_event(stream)
        stream.abort()
        assert await runner.idle()  # The runner knows already.
        assert engine.num_requests == 0
        assert engine.metrics.finished.values() == {"abort": 1}
        current_request.reset(token)

    play(scenario)


def test_an_answer_that_is_ended_before_it_is_accepted() -> None:
    async def scenario(engine: EngineClient, runner: Runner) -> None:
        task = asyncio.create_task(engine.generate(PROMPT, PARAMS))
        message, _ = await runner.receive()
        assert isinstance(message, Generate)
        runner.send(Aborted(message.request))
        runner.send(Rejected(message.request, "invalid", "as a grammar that is being compiled is"))
        with pytest.raises(RequestAborted):
            await task
        assert engine.num_requests == 0

    play(scenario)


# --- questions --------------------------------------------------------------------------------------------------------


def test_replies_have_frames_and_find_their_questions() -> None:
    large = bytes(range(256)) * 4096

    async def scenario(engine: EngineClient, runner: Runner) -> None:
        asking = [
            asyncio.create_task(engine.responses.conversation(f"resp_{each}", lambda size: None)) for each in range(2)
        ]
        questions = [(await runner.receive())[0] for _ in asking]
        assert all(isinstance(each, GetTurns) for each in questions)
        first, second = [each for each in questions if isinstance(each, GetTurns)]
        runner.send(Reply(second.request), b"small", large, b"end")
        runner.send(Heartbeat(Stats(running=3)))
        runner.send(Reply(99), b"whose?")
        runner.send(Reply(first.request, "not_found"))
        assert await asking[0] is None
        found = await asking[1]
        assert found is not None
        assert [bytes(each) for each in found] == [b"small", large, b"end"]
        assert engine.stats.running == 3
        lost = asyncio.create_task(engine.responses.get("resp_0", lambda size: None))
        await runner.receive()
        runner.send(Failed("boom"))
        for each in (lost, engine.responses.delete("resp_0"), engine.abort_answer("cmpl-1")):
            with pytest.raises(EngineFailed):
                await each

    play(scenario)


def test_cancelled_while_it_waits_to_be_accepted() -> None:
    async def scenario(engine: EngineClient, runner: Runner) -> None:
        task = asyncio.create_task(engine.generate(PROMPT, PARAMS))
        message, _ = await runner.receive()
        assert isinstance(message, Generate)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await next_abort(runner) == (message.request, -1)
        assert engine.num_requests == 0

    play(scenario)


def test_a_stream_that_its_route_forgot_ends_with_the_http_request() -> None:
    async def scenario(engine: EngineClient, runner: Runner) -> None:
        context = RequestContext("id")
        token = current_request.set(context)
        _stream, request = await submit(engine, runner)
        current_request.reset(token)
        runner.step([request, request], [1, 2], started=[Started(request, 0, 2, 0.0)])
        await settle(engine, runner)
        context.end()
        assert await next_abort(runner) == (request, -1)
        assert (context.prompt_tokens, context.cached_tokens, context.completion_tokens) == (3, 2, 2)
        assert context.finish_reasons == ["abort"]
        assert context.first_token is not None

    play(scenario)


# --- trouble ----------------------------------------------------------------------------------------------------------


def test_the_runner_fails() -> None:
    async def scenario(engine: EngineClient, runner: Runner) -> None:
        stream, request = await submit(engine, runner)
        waiting, _ = await submit(engine, runner)
        pending = asyncio.create_task(engine.generate(PROMPT, PARAMS))
        await runner.receive()
        reader = asyncio.create_task(next_event(waiting))
        runner.step([request], [1])
        runner.send(Failed("boom"))
        await settle(engine, runner)
        assert await next_tokens(stream) == [1]  # What came before the failure is still told.
        for broken in (next_event(stream), reader, pending, engine.generate(PROMPT, PARAMS)):
            with pytest.raises(EngineFailed):
                await broken
        assert engine.num_requests == 0
        assert engine.metrics.finished["error"].value == 3
        stream.abort()

    play(scenario)


@pytest.mark.parametrize("frame", [b"", b"\xff\x00", msgspec.msgpack.encode(["nonsense"])])
def test_a_message_that_makes_no_sense_is_a_failure(frame: bytes) -> None:
    async def scenario(engine: EngineClient, runner: Runner) -> None:
        stream, _ = await submit(engine, runner)
        runner.outbox.send(frame)
        with pytest.raises(EngineFailed):
            await next_event(stream)

    play(scenario)


def test_a_choice_that_does_not_exist_is_a_failure() -> None:
    async def scenario(engine: EngineClient, runner: Runner) -> None:
        stream, request = await submit(engine, runner)
        runner.step([request], [1], [5])
        with pytest.raises(EngineFailed):
            await next_event(stream)

    play(scenario)


def test_a_silent_runner_does_not_keep_requests_waiting_for_acceptance() -> None:
    async def scenario(engine: EngineClient, runner: Runner) -> None:
        accepted, request = await submit(engine, runner)
        engine._live_seconds = 0.2
        with pytest.raises(Unavailable):
            await engine.generate(PROMPT, PARAMS)
        assert engine.num_requests == 1
        runner.step([request], [1])  # The one that was accepted is still there when the runner comes back.
        assert await next_tokens(accepted) == [1]
        message, _ = await runner.receive()
        assert isinstance(message, Generate)  # A runner that comes back does not run the other for nobody.
        assert (await runner.receive())[0] == Abort(0, message.request)

    play(scenario)


def test_too_many_rows_under_way() -> None:
    prompt = PromptRows(np.array([-1], dtype=np.int32), (Span(0, 1),), bytes(16), (bytes(32),))

    async def scenario(engine: EngineClient, runner: Runner) -> None:
        first = asyncio.create_task(engine.generate(prompt, PARAMS))
        message, _ = await runner.receive()
        assert isinstance(message, Generate)
        with pytest.raises(QueueFull):
            await engine.generate(prompt, PARAMS)
        runner.send(Accepted(message.request))
        await first
        second = asyncio.create_task(engine.generate(prompt, PARAMS))
        await runner.accept()
        await second

    play(scenario, max_unaccepted_bytes=40)


def test_aborts_are_kept_until_the_runner_takes_messages_again() -> None:
    async def scenario(engine: EngineClient, runner: Runner) -> None:
        stream, request = await submit(engine, runner)
        runner.inbox.close(linger=0)
        await until(lambda: not int(engine._to_runner.getsockopt(zmq.EVENTS)) & zmq.POLLOUT)
        stream.abort()
        runner.inbox = runner.context.socket(zmq.PULL)
        runner.inbox.bind(engine.runner_address)
        assert await next_abort(runner) == (request, -1)

    play(scenario)


def test_thousands_of_prompts_may_be_sent_at_once() -> None:
    """A request's prompts go out in one go: the socket's queue must not be too short for them."""

    async def scenario(engine: EngineClient, runner: Runner) -> None:
        tasks = [asyncio.create_task(engine.generate(PROMPT, PARAMS)) for _ in range(5000)]
        for _ in tasks:
            await runner.accept()
        await asyncio.gather(*tasks)

    play(scenario)


def test_nothing_is_left_of_ten_thousand_requests() -> None:
    async def scenario(engine: EngineClient, runner: Runner) -> None:
        async def one(number: int) -> None:
            stream = await engine.generate(PROMPT, PARAMS)
            while await next_event(stream) is not None:
                if number % 3 == 0:
                    stream.abort()

        async def answer() -> None:
            answered = 0
            while answered < 10_000:
                await asyncio.sleep(0)
                while runner.inbox.poll(0):
                    message = decode_to_runner(runner.inbox.recv_multipart()[0])
                    if isinstance(message, Generate):
                        answered += 1
                        runner.send(Accepted(message.request))
                        runner.step([message.request], [1])
                        runner.step([message.request], [2], ends=[End(message.request, 0, "length")])

        answering = asyncio.create_task(answer())
        for start in range(0, 10_000, 100):
            await asyncio.gather(*(one(number) for number in range(start, start + 100)))
        await answering
        assert engine.num_requests == 0
        assert engine._requests == {}
        assert engine._unsent == []
        assert engine._unaccepted_bytes == 0
        assert sum(engine.metrics.finished.values().values()) == 10_000

    play(scenario)


def test_a_step_is_cheap() -> None:
    """Four calls for each token. A task or a queue of its own for each took ten times as long."""

    async def scenario(engine: EngineClient, runner: Runner) -> None:
        requests = [(await submit(engine, runner))[1] for _ in range(256)]
        step = encode(StepOutput(requests, [0] * 256, [5] * 256))
        engine._on_message(step)  # the first tokens are measured
        tasks = asyncio.all_tasks()
        assert calls_of(lambda: engine._on_message(step)) < 256 * 6
        assert asyncio.all_tasks() == tasks

    play(scenario)


def calls_of(function: Callable[[], object]) -> int:
    """How many functions, of Python and of C, are called by `function`."""
    events: list[str] = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        function()
    finally:
        sys.setprofile(None)
    return sum(event in ("call", "c_call") for event in events)
