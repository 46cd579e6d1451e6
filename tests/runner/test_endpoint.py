"""What the runner's process does with several workers. A real one, with a tiny model; the test plays the workers."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from runner.config import RunnerConfig
from runner.messages import (
    Accepted,
    Failed,
    FromRunner,
    Generate,
    Heartbeat,
    Hello,
    Loading,
    LookUp,
    Ready,
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
"""Tokens of each answer."""


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

    def generate(self, request: int) -> None:
        sampling = SamplingParams(max_tokens=LENGTH, temperature=0.0)
        self.send(Generate(self.number, request, 1, sampling), np.array([5, 6, 7], dtype=np.int32).tobytes(), b"")

    def messages(self, seconds: float) -> Iterator[FromRunner]:
        end = time.monotonic() + seconds
        while self.inbox.poll(max(0, int((end - time.monotonic()) * 1000))):
            yield decode_from_runner(self.inbox.recv())

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
    second.generate(1)
    second.wait(lambda message: isinstance(message, StepOutput) and bool(message.tokens))
    first.generate(1)  # The same number, of another worker: another request.
    first.wait(lambda message: isinstance(message, Accepted))
    first.send(WorkerGone(1))
    # What it had sent before may come after the news of its death.
    second.generate(2)
    second.send(Hello(1, "ipc:///nowhere"))
    ended = first.wait(lambda message: isinstance(message, StepOutput) and bool(message.ends))
    assert isinstance(ended, StepOutput)
    assert [(end.request, end.reason) for end in ended.ends] == [(1, "length")]
    first.wait_stats(lambda stats: stats.running == stats.waiting == stats.blocks_used == 0)
    # Neither the request that ran was finished, nor the late one begun.
    first.wait_stats(lambda stats: LENGTH <= stats.generated_tokens < 2 * LENGTH)
    for message in second.messages(0.5):
        assert not (isinstance(message, Accepted) and message.request == 2)
        assert not (isinstance(message, StepOutput) and message.ends)


def test_a_fault_in_the_receiving_thread_ends_the_runner(tmp_path: Path) -> None:
    """It would take nothing in any more, and nobody would notice."""
    script = (
        "from runner.endpoint import Endpoint\n"
        "from runner.__main__ import main\n"
        "def look_up(self, message, frames):\n"
        "    raise KeyError('secret')\n"
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
