"""Requests with a grammar on their way through the endpoint: compiled in a pool, overtaken by nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from llguidance import LLMatcher

from runner.config import RunnerConfig
from runner.endpoint import Command, Endpoint, Refused
from runner.grammar import GrammarCompiler, GrammarError
from runner.messages import Abort, Accepted, FromRunner, Hello, Rejected, SamplingParams, decode_from_runner
from runner.sequence import Request
from tests.models import VOCAB_SIZE, Family
from tests.parity.harness import Harness

WORKER = 0
GRAMMAR = LLMatcher.grammar_from_regex("(ab){3}")


class Bench:
    """An endpoint whose messages a test hands in and whose commands it applies, with a compiler that waits for it."""

    def __init__(self, path: Path, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Endpoint, "_receive", lambda self: None)
        self.harness = Harness(path)
        self.endpoint = Endpoint(RunnerConfig(address="inproc://runner"))
        self.endpoint.set_ready(self.harness.engine)
        self.go = threading.Event()
        self.problem = ""
        self._matchers = GrammarCompiler(str(path), VOCAB_SIZE).compile(GRAMMAR, 1)
        patch.setattr(GrammarCompiler, "compile", self._compile)
        self._socket: zmq.Socket[bytes] = self.endpoint._context.socket(zmq.PULL)
        self._socket.bind("inproc://worker")
        self.endpoint._greet(Hello(WORKER, "inproc://worker"))
        self.receive()  # Ready

    def _compile(self, *_: Any) -> Any:
        assert self.go.wait(20)
        if self.problem:
            raise GrammarError(self.problem)
        return self._matchers

    def submit(self, **sampling: Any) -> int:
        message, frames = self.harness.message([5, 6, 7], 20, temperature=1.0, **sampling)
        self.endpoint._admit(msgspec.structs.replace(message, answer="cmpl-1"), frames)
        return message.request

    def receive(self) -> FromRunner:
        assert self._socket.poll(20_000)
        return decode_from_runner(self._socket.recv())

    def apply(self, count: int) -> list[Command]:
        """The next commands, as the engine's loop would take them."""
        commands = []
        for _ in range(count):
            command = self.endpoint._next_command(20)
            assert command is not None
            self.endpoint._apply(self.harness.engine, command)
            commands.append(command)
        assert self.endpoint._next_command(0) is None
        return commands

    def unfinished(self) -> int:
        return self.endpoint._admission._sequences - self.harness.engine.ended_sequences

    def close(self) -> None:
        self.go.set()
        self.endpoint._pool.shutdown()
        self.endpoint._context.destroy(linger=0)
        assert len(self.endpoint._answers) == 0, "what has ended, or was never begun, is not to be found"


@pytest.fixture
def bench(tiny_model: Callable[[Family], Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(tiny_model("llama"), monkeypatch)
    yield made
    made.close()


def test_nobody_waits_for_another_s_grammar(bench: Bench) -> None:
    slow, quick = bench.submit(grammar=GRAMMAR), bench.submit()
    assert bench.receive() == Accepted(quick)
    assert isinstance(bench.apply(1)[0], Request)
    bench.go.set()
    assert bench.receive() == Accepted(slow)
    bench.apply(1)
    bench.harness.run()
    assert bench.harness.answer(slow).end is not None and bench.unfinished() == 0


def test_a_bad_grammar_is_rejected(bench: Bench) -> None:
    bench.problem = "no good"
    number = bench.submit(grammar=GRAMMAR)
    bench.go.set()
    assert bench.receive() == Rejected(number, "invalid", "no good")
    assert isinstance(bench.apply(1)[0], Refused)
    assert bench.unfinished() == 0
    bench.harness.assert_empty()


def test_an_abort_does_not_overtake_its_request(bench: Bench) -> None:
    """The request is never run, and its place in the queue is free again."""
    number = bench.submit(grammar=GRAMMAR)
    bench.endpoint._abort(Abort(WORKER, number))
    bench.go.set()
    assert isinstance(bench.apply(1)[0], Refused)
    assert bench.unfinished() == 0 and not bench.harness.engine.has_work


def test_an_abort_of_one_choice_comes_after_its_request(bench: Bench) -> None:
    number = bench.submit(grammar=GRAMMAR)
    bench.go.set()
    assert bench.receive() == Accepted(number)
    bench.endpoint._abort(Abort(WORKER, number, 0))
    assert [type(command) for command in bench.apply(2)] == [Request, Abort]
    assert bench.unfinished() == 0


def test_a_worker_that_has_gone_leaves_nothing_running(bench: Bench) -> None:
    bench.submit(grammar=GRAMMAR)
    bench.endpoint._out.pop(WORKER).close(linger=0)
    bench.go.set()
    assert isinstance(bench.apply(1)[0], Refused)
    assert bench.unfinished() == 0


def test_the_message_carries_the_grammar() -> None:
    sent = msgspec.msgpack.encode(SamplingParams(5, grammar=GRAMMAR))
    assert msgspec.msgpack.decode(sent, type=SamplingParams).grammar == GRAMMAR
