"""A runner that a test plays itself, message by message, for an `EngineClient`. Used by the tests of what it sends and
is told, `test_engine_client` and `test_look_ups`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import uvloop
import zmq

from runner.messages import (
    Accepted,
    FromRunner,
    Generate,
    Heartbeat,
    Hello,
    ModelInfo,
    Ready,
    SamplingParams,
    Stats,
    StepOutput,
    ToRunner,
    decode_to_runner,
    encode,
)
from server.engine_client import EngineClient
from server.generation import GenerationStream
from server.metrics import Metrics
from server.private_dir import PrivateDir
from server.prompt import PromptRows

MODEL = ModelInfo("/nowhere", "llama", "float32", 8, 32, 512, 16, 64, 8)
PROMPT = PromptRows.from_token_ids([1, 2, 3])
PARAMS = SamplingParams(max_tokens=16)


class Runner:
    """The other end of the sockets, one step at a time."""

    def __init__(self, engine: EngineClient) -> None:
        self.engine = engine
        self.context = zmq.Context()
        self.inbox = self.context.socket(zmq.PULL)
        self.inbox.bind(engine.runner_address)
        self.outbox = self.context.socket(zmq.PUSH)

    async def receive(self) -> tuple[ToRunner, list[bytes]]:
        """The next message that is not a greeting, and its frames."""
        for _ in range(10_000):
            if self.inbox.poll(0):
                frames = self.inbox.recv_multipart()
                message = decode_to_runner(frames[0])
                if not isinstance(message, Hello):
                    return message, frames[1:]
            await asyncio.sleep(0.002)
        raise AssertionError("no message came")

    async def hello(self) -> Hello:
        while not self.inbox.poll(0):  # noqa: ASYNC110 - a plain socket
            await asyncio.sleep(0.002)
        message = decode_to_runner(self.inbox.recv())
        assert isinstance(message, Hello)
        self.outbox.connect(message.address)
        return message

    def send(self, message: FromRunner, *frames: bytes) -> None:
        self.outbox.send_multipart([encode(message), *frames])

    def step(
        self, requests: Sequence[int], tokens: Sequence[int], choices: Sequence[int] | None = None, **rest: Any
    ) -> None:
        self.send(StepOutput(list(requests), list(choices or [0] * len(requests)), list(tokens), **rest))

    async def accept(self) -> Generate:
        message, _ = await self.receive()
        assert isinstance(message, Generate)
        self.send(Accepted(message.request))
        return message

    async def idle(self) -> bool:
        """Whether nothing comes for a while."""
        await asyncio.sleep(0.05)
        return not self.inbox.poll(0)


def play(
    scenario: Callable[[EngineClient, Runner], Awaitable[None]], *, ready: bool = True, **options: Any
) -> EngineClient:
    """Run `scenario` between a client and the runner that it plays."""

    async def main() -> EngineClient:
        folder = PrivateDir()
        engine = EngineClient(Metrics("m"), folder.path, **options)
        runner = Runner(engine)
        engine.start()
        try:
            await runner.hello()
            if ready:
                runner.send(Ready(MODEL))
                assert await engine.wait_ready() == MODEL
            await asyncio.wait_for(scenario(engine, runner), 60)
        finally:
            runner.context.destroy(linger=0)
            await engine.close()
            folder.remove()
        return engine

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        return loop.run(main())


async def submit(engine: EngineClient, runner: Runner, **options: Any) -> tuple[GenerationStream, int]:
    """An accepted request: its stream and its number."""
    task = asyncio.create_task(engine.generate(options.pop("prompt", PROMPT), PARAMS, **options))
    message = await runner.accept()
    return await task, message.request


async def until(is_true: Callable[[], bool]) -> None:
    """What sets no event. `play` ends it where it never comes."""
    while not is_true():  # noqa: ASYNC110
        await asyncio.sleep(0.002)


async def settle(engine: EngineClient, runner: Runner) -> None:
    """Let what was sent arrive: a last message does behind it."""
    steps = engine.stats.steps + 1
    runner.send(Heartbeat(Stats(steps=steps)))
    await until(lambda: engine.stats.steps == steps)
