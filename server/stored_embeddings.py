"""The runner's store of embeddings as one API process sees it: questions out, answers in. Used by the routes of
`prompt_embeds` and by `inputs`, fed by the engine client. Everything here runs on the event loop's thread.

Whose embeddings are meant follows from the request that is being answered: each API key has its own.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from runner.messages import (
    DeleteRows,
    FindRows,
    ListRows,
    PutRows,
    StoreAnswer,
    StoredInfo,
    ToStore,
    encode,
)
from server.embeddings import Rows
from server.errors import APIError, BodyTooLarge, InvalidRequest, QueueFull, Unavailable
from server.request_context import current_request

_ANSWER_SECONDS = 60.0
"""The runner answers at once, but behind what was sent before: gigabytes of rows, at worst."""
_NO_KEY = -1


class NoSuchEmbedding(APIError):
    def __init__(self, param: str) -> None:
        message = f"{param}: no stored embedding of yours has this id. Stored ones expire, and make room for others."
        super().__init__(404, message, param=param, code="prompt_embeds_not_found")


class Send(Protocol):
    def __call__(self, *frames: bytes | memoryview) -> bool:
        """Never waits. False where the message was not taken."""


class StoredEmbeddings:
    """`worker`: by which number the runner knows this process. `check`: raises APIError while there is no runner.
    `max_bytes`: of rows that may be on their way at once."""

    def __init__(self, worker: int, send: Send, check: Callable[[], None], max_bytes: int) -> None:
        self._worker = worker
        self._send = send
        self._check = check
        self._max_bytes = max_bytes
        self._bytes = 0
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[StoreAnswer]] = {}

    async def put(self, rows: Rows, sha256: str) -> StoredInfo:
        """`sha256`: hex, of `rows.data`. Raises BodyTooLarge, QueueFull (no room now), Unavailable, EngineFailed."""
        size = rows.data.nbytes
        if self._bytes and self._bytes + size > self._max_bytes:
            raise QueueFull("Too many embeddings are waiting to be stored.")
        self._bytes += size
        try:
            message = PutRows(self._worker, next(self._numbers), _owner(), sha256)
            answer = await self._ask(message, rows.digests, rows.data)
        finally:
            self._bytes -= size
        if answer.problem == "too_large":
            raise BodyTooLarge("These rows are larger than what this server stores for one client.")
        if answer.problem == "full":
            raise QueueFull("The server's memory for stored embeddings is in use.")
        if answer.problem == "rate_limit":
            raise QueueFull(answer.message, retry_after=max(1, math.ceil(answer.retry_after)))
        if answer.problem:
            raise InvalidRequest("These rows cannot be stored.")
        return answer.entries[0]

    async def find(self, ids: Iterable[str]) -> dict[str, StoredInfo]:
        """Those of them that there are. Raises Unavailable, EngineFailed."""
        message = FindRows(self._worker, next(self._numbers), _owner(), tuple(ids))
        return {entry.id: entry for entry in (await self._ask(message)).entries}

    async def page(self, after: str, limit: int, *, newest_first: bool) -> tuple[Sequence[StoredInfo], bool]:
        """At most `limit` behind `after`, and whether there are more. Raises NoSuchEmbedding for `after`."""
        message = ListRows(self._worker, next(self._numbers), _owner(), after, limit, newest_first)
        answer = await self._ask(message)
        if answer.problem:
            raise NoSuchEmbedding("after")
        return answer.entries, answer.has_more

    async def delete(self, id: str) -> StoredInfo:
        """Raises NoSuchEmbedding."""
        answer = await self._ask(DeleteRows(self._worker, next(self._numbers), _owner(), id))
        if answer.problem:
            raise NoSuchEmbedding("id")
        return answer.entries[0]

    async def _ask(self, message: ToStore, *frames: bytes | memoryview) -> StoreAnswer:
        self._check()
        future: asyncio.Future[StoreAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[message.request] = future
        try:
            if not self._send(encode(message), *frames):
                raise QueueFull("The engine is not taking requests fast enough.")
            async with asyncio.timeout(_ANSWER_SECONDS):
                return await future
        except TimeoutError:
            raise Unavailable("The engine does not answer.") from None
        finally:
            del self._waiting[message.request]

    # --- called by the engine client --------------------------------------------------------------------------------

    def on_answer(self, answer: StoreAnswer) -> None:
        future = self._waiting.get(answer.request)
        if future is not None and not future.done():
            future.set_result(answer)

    def fail(self, error: APIError) -> None:
        """The runner is gone."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)


def _owner() -> int:
    context = current_request.get()
    return _NO_KEY if context is None or context.api_key is None else context.api_key
