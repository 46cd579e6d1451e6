"""The responses that can be asked for again, as one API process sees them: they are kept in the runner
(`runner.record_store`), where every API process finds them. Used by the routes, on the event loop.

Whose responses are meant follows from the request that is being answered: each API key has its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from runner.messages import MAX_RECORD_BYTES, DeleteRecord, GetRecord, GetTurns, PutRecord, StoreProblem
from server.errors import InvalidRequest
from server.questions import Questions, Replied
from server.request_context import current_client

MAX_RESPONSE_BYTES = MAX_RECORD_BYTES
"""Of one, and what it adds to its conversation: a larger one is not kept."""
MAX_CONVERSATION_BYTES = 16 << 20
"""Of all turns of one: more are not read again for one request."""


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

    async def get(self, response_id: str) -> bytes | None:
        """As JSON."""
        owner = current_client()
        reply, frames = await self._questions.ask(lambda number: GetRecord(self._worker, number, owner, response_id))
        return None if reply.problem else bytes(frames[0])

    async def conversation(self, response_id: str) -> Sequence[memoryview] | None:
        """The turns of the response and of all before it, as they were put, the first one's first; None unless all are
        there. Raises InvalidRequest for too many."""
        owner, limit = current_client(), MAX_CONVERSATION_BYTES
        reply, frames = await self._questions.ask(
            lambda number: GetTurns(self._worker, number, owner, response_id, limit)
        )
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

    async def delete(self, response_id: str, *, surely: bool = False) -> bool:
        """Whether it was there. `surely`: as for `put`."""
        owner = current_client()
        ask = self._questions.ask_surely if surely else self._questions.ask
        reply, _ = await ask(lambda number: DeleteRecord(self._worker, number, owner, response_id))
        return not reply.problem
