"""Responses in the background: made after their requests have been answered, and kept under their ids from the moment
when the engine has accepted them. Called by `routes`.

    queued ──► in_progress ──► completed | incomplete | failed | cancelled

The runner knows a response that is being made by its id, as any answer, so it can be cancelled through every API
process; and it keeps with the record what it becomes if the process that makes it dies. There are as many of them as
the runner queues.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from contextlib import aclosing
from contextvars import Token
from typing import Any

import msgspec

from server.errors import APIError, BodyTooLarge, EngineFailed, InternalError, RequestAborted, log_exception
from server.request_context import RequestContext, current_request
from server.responses.create import ResponseAnswer
from server.responses.store import MAX_RESPONSE_BYTES, ResponseStore

Json = dict[str, Any]
_encode = msgspec.json.Encoder().encode


class OwnContext:
    """In its body the current request is one of its own, which is not over when the HTTP request is. Where the body
    raises it is over then; else whoever takes it on (`context`) ends it."""

    def __init__(self) -> None:
        asked = current_request.get()
        self.context = RequestContext("")
        if asked is not None:
            self.context = RequestContext(asked.id, asked.client_id, asked.api_key, asked.started)
        self._token: Token[RequestContext | None] | None = None

    def __enter__(self) -> RequestContext:
        self._token = current_request.set(self.context)
        return self.context

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._token is not None:
            current_request.reset(self._token)
        if kind is not None:
            self.context.end()


class BackgroundResponse:
    """One, from the engine's acceptance to its end. `context`: its own."""

    def __init__(
        self, answer: ResponseAnswer, store: ResponseStore, previous: str | None, context: RequestContext
    ) -> None:
        self._answer = answer
        self._store = store
        self._previous = previous
        self._context = context
        self.begun: asyncio.Future[bytes | APIError] = asyncio.get_running_loop().create_future()
        """As it is queued, as JSON; or why it is not."""

    async def run(self) -> None:
        try:
            self.begun.set_result(await self._begin())
            await self._make()
        except RequestAborted:
            await self._keep(self._answer.cancelled())
        except APIError as error:
            await self._fail(error)
        except Exception as error:
            log_exception(error)
            await self._fail(InternalError())
        finally:
            self._answer.answer.close()
            self._context.end()

    async def _fail(self, error: APIError) -> None:
        """Whoever has asked for it is told, or will be."""
        # What comes now takes as long as the runner does; nothing is to be made meanwhile that nobody will see.
        self._answer.answer.close()
        if self.begun.done():
            await self._keep(self._answer.failed(error))
            return
        self._context.end()
        self.begun.set_result(error)
        with contextlib.suppress(APIError):  # The runner may have kept it, and not have said so in time.
            await self._store.delete(self._answer.head.id, surely=True)

    async def _begin(self) -> bytes:
        """Keeps it as queued; returns it as JSON. Raises APIError."""
        head = self._answer.head
        body = head.running("queued")
        data = _encode(body)
        if not body["store"] or await self._store.put(head.id, data, b"", self._previous, will=self._will()):
            raise BodyTooLarge(f"A response in the background is kept, and {MAX_RESPONSE_BYTES} bytes at most.")
        return data

    async def _make(self) -> None:
        is_first = True
        async with aclosing(self._answer.answer.deltas()) as deltas:
            async for delta in deltas:
                if is_first:
                    is_first = False
                    await self._keep(self._answer.head.running(), will=self._will())
                deque(self._answer.feed(delta), maxlen=0)
        body, _ = await self._answer.end()
        if not body["store"]:
            raise BodyTooLarge(f"The response is larger than {MAX_RESPONSE_BYTES} bytes and cannot be kept.")

    async def _keep(self, body: Json, will: bytes = b"") -> None:
        """In the place of what is kept of it, without its output if that is too large. Nothing, where it was deleted,
        or the runner has gone and all with it. How it has ended (there is no `will` then) is said until the runner has
        heard it: else it would seem to be in progress for as long as it is kept."""
        with contextlib.suppress(APIError):
            data = _encode(body)
            problem = await self._store.put(
                body["id"], data, b"", self._previous, will=will, replaces=True, surely=not will
            )
            if problem == "too_large" and body["output"]:
                await self._keep(body | {"output": []}, will)

    def _will(self) -> bytes:
        return _encode(self._answer.head.failed(EngineFailed("The server lost this response."), []))
