"""What the runner's process does with several workers. A real one, with a tiny model; the test plays the workers."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from runner.config import RunnerConfig
from runner.endpoint import Endpoint
from runner.messages import (
    AbortAnswer,
    Aborted,
    Accepted,
    Failed,
    FromRunner,
    Generate,
    GetRecord,
    GetTurns,
    Heartbeat,
    Hello,
    Loading,
    LookUp,
    PutRecord,
    Ready,
    Reply,
    SamplingParams,
    Stats,
    StepOutput,
    ToRunner,
    WorkerGone,
    decode_from_runner,
    encode,
)
from tests.models import Family

LENGTH = 400
"""Tokens of each choice: half a second's."""
MANY = 128
"""Choices. With one slot they take a minute, so that an answer runs until the test ends it."""


class Worker:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: str, number: int) -> None:
        self.number = number
        self.inbox = context.socket(zmq.PULL)
        self.inbox.bind(f"ipc://{folder}/worker{number}")
        self.outbox = context.socket(zmq.PUSH)
        self.outbox.connect(f"ipc://{folder}/runner")
        self.send(Hello(number, f"ipc://{folder}/worker{number}"))

    def send(self, message: ToRunner, *frames: bytes) -> None:
        self.outbox.send_multipart([encode(message), *frames])

    def generate(self, request: int, n: int = 1, answer: str = "", grammar: str = "") -> None:
        sampling = SamplingParams(max_tokens=LENGTH, temperature=0.0, grammar=grammar)
        message = Generate(self.number, request, n, sampling, answer=answer)
        self.send(message, np.array([5, 6, 7], dtype=np.int32).tobytes(), b"")

    def messages(self, seconds: float) -> Iterator[FromRunner]:
        end = time.monotonic() + seconds
        while self.inbox.poll(max(0, int((end - time.monotonic()) * 1000))):
            frame, *self.frames = self.inbox.recv_multipart()
            yield decode_from_runner(frame)

    def ask(self, message: ToRunner, *frames: bytes) -> tuple[str, list[bytes]]:
        """The reply's problem, and the frames behind it."""
        self.send(message, *frames)
        reply = self.wait(lambda message: isinstance(message, Reply))
        assert isinstance(reply, Reply)
        return reply.problem, self.frames

    def wait(self, wanted: Callable[[FromRunner], bool], seconds: float = 60) -> FromRunner:
        for message in self.messages(seconds):
            if wanted(message):
                return message
        raise AssertionError("no such message came")

    def wait_stats(self, wanted: Callable[[Stats], bool]) -> None:
        self.wait(lambda message: isinstance(message, Heartbeat) and wanted(message.stats), 20)


@pytest.fixture
def workers(tiny_model: Callable[[Family], Path]) -> Iterator[tuple[Worker, Worker]]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        config = RunnerConfig(
            address=f"ipc://{folder}/runner",
            model=str(tiny_model("llama")),
            device="cpu",
            dtype="float32",
            kv_cache_memory_bytes=64 << 20,
            max_num_seqs=1,
        )
        context = zmq.Context()
        command = [sys.executable, "-m", "runner", config.to_json()]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            try:
                pair = Worker(context, folder, 0), Worker(context, folder, 1)
                for worker in pair:
                    worker.wait(lambda message: isinstance(message, Ready))
                yield pair
            finally:
                context.destroy(linger=0)
                process.kill()


def test_what_a_dead_worker_used_is_freed(workers: tuple[Worker, Worker]) -> None:
    first, second = workers
    second.generate(1, n=MANY)
    second.wait(lambda message: isinstance(message, StepOutput) and bool(message.tokens))
    first.generate(1)  # The same number, of another worker: another request.
    first.wait(lambda message: isinstance(message, Accepted))
    first.send(WorkerGone(1))
    # What it had sent before may come after the news of its death.
    second.generate(2, n=MANY)
    second.send(Hello(1, "ipc:///nowhere"))
    ended = first.wait(lambda message: isinstance(message, StepOutput) and bool(message.ends))
    assert isinstance(ended, StepOutput)
    assert [(end.request, end.reason) for end in ended.ends] == [(1, "length")]
    first.wait_stats(lambda stats: stats.running == stats.waiting == stats.blocks_used == 0)
    # Neither the request that ran was finished, nor the late one begun.
    first.wait_stats(lambda stats: LENGTH <= stats.generated_tokens < MANY * LENGTH)
    told = list(second.messages(0.5))
    assert not any(isinstance(message, Accepted) and message.request == 2 for message in told)
    assert sum(len(message.ends) for message in told if isinstance(message, StepOutput)) < MANY


def test_an_answer_is_aborted_whichever_worker_it_came_from(workers: tuple[Worker, Worker]) -> None:
    first, second = workers
    first.generate(1, n=MANY, answer="one")  # runs; the others wait
    first.generate(2, answer="one")
    first.generate(3, answer="other")
    second.generate(1, answer="second")
    for worker, count in ((first, 3), (second, 1)):
        for _ in range(count):
            worker.wait(lambda message: isinstance(message, Accepted))
    assert second.ask(AbortAnswer(1, 1, 5, "one")) == ("not_found", []), "another client's"
    assert second.ask(AbortAnswer(1, 2, 0, "")) == ("not_found", [])
    assert first.ask(AbortAnswer(0, 1, 0, "second")) == ("", [])
    assert second.wait(lambda message: isinstance(message, Aborted)) == Aborted(1)
    assert second.ask(AbortAnswer(1, 3, 0, "one")) == ("", [])
    told = [first.wait(lambda message: isinstance(message, Aborted)) for _ in range(2)]
    assert told == [Aborted(1), Aborted(2)]
    ended = first.wait(lambda message: isinstance(message, StepOutput) and 3 in [end.request for end in message.ends])
    assert isinstance(ended, StepOutput)
    assert [(end.request, end.reason) for end in ended.ends] == [(3, "length")]
    first.wait_stats(lambda stats: stats.running == stats.waiting == stats.blocks_used == 0)
    for name in ("one", "other", "second"):
        assert first.ask(AbortAnswer(0, 2, 0, name)) == ("not_found", []), "it has ended"


def test_records_are_every_workers(workers: tuple[Worker, Worker]) -> None:
    first, second = workers
    large = bytes(range(256)) * 8192
    assert first.ask(PutRecord(0, 1, 4, "a"), b"body", large) == ("", [])
    assert second.ask(PutRecord(1, 1, 4, "b", "a"), large, b"more") == ("", [])
    assert first.ask(GetRecord(0, 2, 4, "b")) == ("", [large])
    assert second.ask(GetTurns(1, 2, 4, "b", 1 << 22)) == ("", [large, b"more"])
    assert second.ask(GetRecord(1, 3, 5, "a")) == ("not_found", [])
    assert second.ask(PutRecord(1, 4, 4, "open"), b"body", b"", b"will") == ("", [])
    first.send(WorkerGone(1))
    assert first.ask(GetRecord(0, 3, 4, "b")) == ("", [large]), "it outlives the one that has put it"
    assert first.ask(GetRecord(0, 4, 4, "open")) == ("", [b"will"])


def test_a_fault_in_the_receiving_thread_ends_the_runner(tmp_path: Path) -> None:
    """It would take nothing in any more, and nobody would notice."""
    script = (
        "from runner.endpoint import Endpoint\n"
        "from runner.__main__ import main\n"
        "def look_up(self, message, frames):\n"
        "    raise KeyError('sec' + 'ret')\n"  # from Python 3.13 on a traceback has such a script's lines
        "Endpoint._look_up = look_up\n"
        "main()\n"
    )
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, zmq.Context() as context:
        config = RunnerConfig(address=f"ipc://{folder}/runner", device="cpu")
        command = [sys.executable, "-c", script, config.to_json()]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            worker = Worker(context, folder, 0)
            worker.wait(lambda message: isinstance(message, Loading))
            worker.send(LookUp(0, 1))
            failed = worker.wait(lambda message: isinstance(message, Failed))
            assert isinstance(failed, Failed)
            assert failed.message == "its receiving thread died: KeyError"
            assert process.wait(20) == 1
            assert process.stderr is not None
            said = process.stderr.read()
            context.destroy(linger=0)
    assert "the receiving thread died: KeyError" in said
    assert "in look_up" in said  # where
    assert "secret" not in said  # a prompt, for all we know


def test_the_answer_to_a_greeting_is_not_behind_the_next_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker would take the start to have gone back to it."""
    monkeypatch.setattr(Endpoint, "_receive", lambda self: None)
    endpoint = Endpoint(RunnerConfig(address="inproc://runner"))
    next_stage = threading.Thread(target=endpoint.set_stage, args=("reading",))
    sent: list[FromRunner] = []

    def send(worker: int, message: FromRunner) -> None:
        if threading.current_thread() is not next_stage:
            next_stage.start()
            next_stage.join(0.5)  # for as long as it would take if nothing held it up
        sent.append(message)

    monkeypatch.setattr(endpoint, "_send", send)
    endpoint._greet(Hello(0, "inproc://worker"))
    next_stage.join()
    endpoint._context.destroy(linger=0)
    assert sent == [Loading("starting"), Loading("reading")]
