"""What one API process asks the runner and the runner answers at once: to end an answer, for the records that all API
processes share, for stored embeddings. Kept by the engine client, on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from runner.messages import AbortAnswer, Reply, ToRecords, ToStore, encode
from server.errors import APIError, QueueFull, Unavailable

_ANSWER_SECONDS = 60.0
"""The runner answers at once, but behind what was sent before: gigabytes of rows, at worst."""
_AGAIN_SECONDS = 0.2
"""After which what has to arrive is sent again."""

Question = AbortAnswer | ToRecords | ToStore
Answer = TypeVar("Answer")
Replied = tuple[Reply, Sequence[memoryview]]
"""A `Reply` and the frames behind it."""


class Send(Protocol):
    def __call__(self, *frames: bytes | memoryview) -> bool:
        """Never waits. False where the message was not taken."""


class Questions(Generic[Answer]):
    """Of one kind of answer. `check`: raises APIError while there is no runner."""

    def __init__(self, send: Send, check: Callable[[], None]) -> None:
        self._send = send
        self._check = check
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Answer]] = {}

    async def ask(self, question: Callable[[int], Question], *frames: bytes | memoryview) -> Answer:
        """`question`: made with its number. Raises QueueFull (429), Unavailable and EngineFailed (503)."""
        return await self._ask(question, frames, _ANSWER_SECONDS)

    async def ask_surely(self, question: Callable[[int], Question], *frames: bytes | memoryview) -> Answer:
        """The same, however long the runner takes to take it and to answer: for what nobody could ask again. Raises
        EngineFailed."""
        while True:
            with contextlib.suppress(QueueFull):
                return await self._ask(question, frames, None)
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _ask(
        self, question: Callable[[int], Question], frames: Sequence[bytes | memoryview], seconds: float | None
    ) -> Answer:
        self._check()
        number = next(self._numbers)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            if not self._send(encode(question(number)), *frames):
                raise QueueFull("The engine is not taking requests fast enough.")
            async with asyncio.timeout(seconds):
                return await future
        except TimeoutError:
            raise Unavailable("The engine does not answer.") from None
        finally:
            del self._waiting[number]

    def on_answer(self, number: int, answer: Answer) -> None:
        """To the question of this number, if anybody still waits for it."""
        future = self._waiting.get(number)
        if future is not None and not future.done():
            future.set_result(answer)

    def fail(self, error: APIError) -> None:
        """The runner is gone."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
