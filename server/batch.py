"""The engine requests behind one HTTP request, one per prompt, read as one stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from runner.messages import SamplingParams
from server.generation import ChoiceEvent
from server.prompt import PromptRows

_READ_AHEAD = 64
"""Events in the queue. Behind it they are merged per choice, so a slow client costs no memory."""


class Stream(Protocol):
    """`generation.GenerationStream`, as far as it is used here."""

    def __aiter__(self) -> AsyncIterator[ChoiceEvent]: ...

    def abort(self, choice: int = -1) -> None: ...


class Engine(Protocol):
    """`engine_client.EngineClient`, as far as the routes use it."""

    async def generate(
        self, prompt: PromptRows, sampling: SamplingParams, n: int = 1, cache_salt: str = "", priority: int = 0
    ) -> Stream: ...

    async def token_rows(self, token_ids: Sequence[int]) -> list[bytes]: ...


@dataclass(frozen=True, slots=True)
class EngineRequest:
    prompt: PromptRows
    sampling: SamplingParams
    n: int
    cache_salt: str
    priority: int = 0


class Batch:
    """Accepted engine requests. Whoever has one calls `close` in the end, which aborts what has not ended."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._streams = streams

    @classmethod
    async def open(cls, engine: Engine, requests: Sequence[EngineRequest]) -> Batch:
        """All of `requests`, or, if one is refused, none. Raises its APIError."""
        tasks = [asyncio.ensure_future(_generate(engine, request)) for request in requests]
        try:
            return cls(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            for opened in await asyncio.gather(*tasks, return_exceptions=True):
                if not isinstance(opened, BaseException):
                    opened.abort()
            raise

    def abort(self, prompt: int, choice: int) -> None:
        self._streams[prompt].abort(choice)

    def close(self) -> None:
        for stream in self._streams:
            stream.abort()

    async def events(self) -> AsyncGenerator[tuple[int, ChoiceEvent]]:
        """(the prompt's index, what is new of one of its choices), until all have ended. Raises APIError."""
        if len(self._streams) == 1:
            async for event in self._streams[0]:
                yield 0, event
            return
        queue: asyncio.Queue[tuple[int, ChoiceEvent] | int | Exception] = asyncio.Queue(_READ_AHEAD)
        tasks = [asyncio.create_task(_pump(index, stream, queue)) for index, stream in enumerate(self._streams)]
        try:
            running = len(tasks)
            while running:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, int):
                    running -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()


async def _generate(engine: Engine, request: EngineRequest) -> Stream:
    return await engine.generate(request.prompt, request.sampling, request.n, request.cache_salt, request.priority)


async def _pump(index: int, stream: Stream, queue: asyncio.Queue[tuple[int, ChoiceEvent] | int | Exception]) -> None:
    try:
        async for event in stream:
            await queue.put((index, event))
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(index)
