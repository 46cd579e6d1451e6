"""The engine requests behind one HTTP request, one per prompt, read as one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from runner.messages import SamplingParams
from server.generation import ChoiceEvent, Direct
from server.prompt import PromptRows

_TURN_REQUESTS = 32
"""Sent without giving the event loop a turn: a few milliseconds."""


class Stream(Protocol):
    """`generation.GenerationStream`, as far as it is used here."""

    def listen(self, on_news: Callable[[], None] | None) -> None: ...

    def take_directly(self, direct: Direct) -> None: ...

    def take(self) -> ChoiceEvent | None: ...

    @property
    def has_ended(self) -> bool: ...

    def abort(self, choice: int = -1) -> None: ...


class Engine(Protocol):
    """`engine_client.EngineClient`, as far as the routes use it."""

    async def generate(
        self, prompt: PromptRows, sampling: SamplingParams, n: int = 1, cache_salt: str = "", priority: int = 0
    ) -> Stream: ...

    async def token_rows(self, token_ids: Sequence[int]) -> list[bytes]: ...

    async def abort_answer(self, answer_id: str) -> bool: ...


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
        self._only = streams[0] if len(streams) == 1 else None
        self._running = set(range(len(streams)))
        """Those that have not been seen to end."""
        self._news: dict[int, None] = {}
        """Those that may have something, in the order in which they said so."""
        self._on_news: Callable[[], None] | None = None

    @classmethod
    async def open(cls, engine: Engine, requests: Sequence[EngineRequest]) -> Batch:
        """All of `requests`, or, if one is refused, none. Raises its APIError."""
        tasks: list[asyncio.Future[Stream]] = []
        try:
            for request in requests:
                tasks.append(asyncio.ensure_future(_generate(engine, request)))
                if len(tasks) % _TURN_REQUESTS == 0:
                    await asyncio.sleep(0)  # all that were begun are sent in one turn of the loop's
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

    def listen(self, on_news: Callable[[], None] | None) -> None:
        """Have `on_news` called, in the caller's context, when there may be something to `take`; None: no more."""
        self._on_news = on_news
        if self._only is not None:
            self._only.listen(on_news)
            return
        for index, stream in enumerate(self._streams):
            stream.listen(None if on_news is None else partial(self._hear, index))

    def take_directly(self, direct: Direct) -> None:
        """As `GenerationStream.take_directly`; nothing where there are several prompts."""
        if self._only is not None:
            self._only.take_directly(direct)

    def take(self) -> tuple[int, ChoiceEvent] | None:
        """The index of a prompt, and what is new of one of its choices; None: nothing at the moment, or nothing any
        more (`has_ended`). Raises APIError."""
        if self._only is not None:
            event = self._only.take()
            return None if event is None else (0, event)
        while self._news:
            index = next(iter(self._news))
            stream = self._streams[index]
            if (event := stream.take()) is not None:
                return index, event
            del self._news[index]
            if stream.has_ended:
                self._running.discard(index)
        return None

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come."""
        return not self._running if self._only is None else self._only.has_ended

    def _hear(self, index: int) -> None:
        self._news[index] = None
        if self._on_news is not None:
            self._on_news()


async def _generate(engine: Engine, request: EngineRequest) -> Stream:
    return await engine.generate(request.prompt, request.sampling, request.n, request.cache_salt, request.priority)
