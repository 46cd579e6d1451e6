"""The runner's store of embeddings as one API process sees it: used by the routes of `prompt_embeds` and by
`stored_parts`, on the event loop.

Whose embeddings are meant follows from the request that is being answered: each API key has its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from runner.messages import (
    DeleteRows,
    FindRows,
    ListRows,
    PutRows,
    StoreAnswer,
    StoredInfo,
)
from server.errors import APIError, BodyTooLarge, InvalidRequest, QueueFull
from server.questions import Questions
from server.request_context import current_client
from server.rows import Rows


class NoSuchEmbedding(APIError):
    def __init__(self, param: str) -> None:
        message = f"{param}: no stored embedding of yours has this id. Stored ones expire, and make room for others."
        super().__init__(404, message, param=param, code="prompt_embeds_not_found")


class StoredEmbeddings:
    """`worker`: by which number the runner knows this process. `max_bytes`: of rows that may be on their way at
    once."""

    def __init__(self, worker: int, questions: Questions[StoreAnswer], max_bytes: int) -> None:
        self._worker = worker
        self._questions = questions
        self._max_bytes = max_bytes
        self._bytes = 0
        self.shares = False
        """Whether the runner reads memory of this process."""

    async def put(self, rows: Rows, sha256: str) -> StoredInfo:
        """`sha256`: hex, of `rows.data`. Raises BodyTooLarge, QueueFull (no room now), Unavailable, EngineFailed."""
        size = rows.data.nbytes
        if self._bytes and self._bytes + size > self._max_bytes:
            raise QueueFull("Too many embeddings are waiting to be stored.")
        self._bytes += size
        try:
            owner = current_client()
            shared = rows.shared.told if self.shares and rows.shared is not None else None
            answer = await self._questions.ask(
                lambda number: PutRows(self._worker, number, owner, sha256, shared),
                rows.digests,
                rows.data if shared is None else b"",
            )
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
        owner, asked = current_client(), tuple(ids)
        answer = await self._questions.ask(lambda number: FindRows(self._worker, number, owner, asked))
        return {entry.id: entry for entry in answer.entries}

    async def page(self, after: str, limit: int, *, newest_first: bool) -> tuple[Sequence[StoredInfo], bool]:
        """At most `limit` behind `after`, and whether there are more. Raises NoSuchEmbedding for `after`."""
        owner = current_client()
        answer = await self._questions.ask(
            lambda number: ListRows(self._worker, number, owner, after, limit, newest_first)
        )
        if answer.problem:
            raise NoSuchEmbedding("after")
        return answer.entries, answer.has_more

    async def delete(self, id: str) -> StoredInfo:
        """Raises NoSuchEmbedding."""
        owner = current_client()
        answer = await self._questions.ask(lambda number: DeleteRows(self._worker, number, owner, id))
        if answer.problem:
            raise NoSuchEmbedding("id")
        return answer.entries[0]
