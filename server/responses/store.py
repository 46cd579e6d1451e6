"""The responses that can be asked for again, as one API process sees them: they are kept in the runner
(`runner.record_store`), where every API process finds them. Used by the routes, on the event loop.

Whose responses are meant follows from the request that is being answered: each API key has its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from runner.messages import MAX_RECORD_BYTES, DeleteRecord, GetRecord, GetTurns, PutRecord, StoreProblem
from server.answer_memory import Reserve
from server.errors import InvalidRequest
from server.questions import Questions, Replied
from server.request_context import current_client

MAX_RESPONSE_BYTES = MAX_RECORD_BYTES
"""Of one, and what it adds to its conversation: a larger one is not kept."""
MAX_CONVERSATION_BYTES = 16 << 20
"""Of all turns of one: more are not read again for one request."""
_SMALL_BYTES = 32 << 10
"""What most responses and conversations are not larger than: these come at the first question."""
_COPIES = 3
"""A conversation is here as it came, as turns, and as the text that the chat template makes of them."""


class ResponseStore:
    """`worker`: by which number the runner knows this process. Everything here raises QueueFull (429), Unavailable and
    EngineFailed (503)."""

    def __init__(self, worker: int, questions: Questions[Replied]) -> None:
        self._worker = worker
        self._questions = questions

    async def put(
        self,
        response_id: str,
        body: bytes,
        turns: bytes,
        previous: str | None,
        *,
        will: bytes = b"",
        replaces: bool = False,
        surely: bool = False,
    ) -> StoreProblem:
        """Keep a response, as JSON, and what it adds to the conversation that `previous` is in: empty while nobody can
        go on from it. `will`: what it becomes if this process dies. `replaces`: only if it is kept already.
        `surely`: however long the runner takes; raises nothing but EngineFailed then.

        Returns what is in the way: `too_large`, `not_found`, or nothing.
        """
        owner, before = current_client(), previous or ""
        ask = self._questions.ask_surely if surely else self._questions.ask
        reply, _ = await ask(
            lambda number: PutRecord(self._worker, number, owner, response_id, before, replaces),
            *((body, turns, will) if will else (body, turns)),
        )
        return reply.problem

    async def get(self, response_id: str, reserve: Reserve) -> memoryview | None:
        """As JSON. `reserve`: called with its size before it comes."""
        reply, frames = await self._found(GetRecord, response_id, MAX_RESPONSE_BYTES, reserve)
        return None if reply.problem else frames[0]

    async def conversation(self, response_id: str, reserve: Reserve) -> Sequence[memoryview] | None:
        """The turns of the response and of all before it, as they were put, the first one's first; None unless all are
        there. `reserve`: called with their size, times what becomes of them, before they come. Raises InvalidRequest
        for too many."""
        limit = MAX_CONVERSATION_BYTES
        reply, frames = await self._found(GetTurns, response_id, limit, lambda size: reserve(_COPIES * size))
        if reply.problem == "too_large":
            raise InvalidRequest(
                f"previous_response_id: the conversation before is larger than {limit} bytes.",
                param="previous_response_id",
            )
        if not all(map(len, frames)):
            raise InvalidRequest(
                "previous_response_id: this response, or one before it, has not ended well, or not yet.",
                param="previous_response_id",
            )
        return None if reply.problem else frames

    async def _found(
        self, question: type[GetRecord] | type[GetTurns], response_id: str, limit: int, reserve: Reserve
    ) -> Replied:
        """However many ask for the same, each gets a copy of it: what is not small comes only when there is room."""
        owner, room = current_client(), min(_SMALL_BYTES, limit)
        while True:
            reserve(room)
            asked = room
            reply, frames = await self._questions.ask(
                lambda number, most=asked: question(self._worker, number, owner, response_id, most)  # type: ignore[misc]
            )
            if reply.problem != "too_large" or not asked < reply.size <= limit:
                return reply, frames
            room = reply.size

    async def delete(self, response_id: str, *, surely: bool = False) -> bool:
        """Whether it was there. `surely`: as for `put`."""
        owner = current_client()
        ask = self._questions.ask_surely if surely else self._questions.ask
        reply, _ = await ask(lambda number: DeleteRecord(self._worker, number, owner, response_id))
        return not reply.problem
