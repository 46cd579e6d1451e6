"""Middleware: limits what clients may make the server hold while it reads their bodies. Nothing else does.

- A body that is too large is refused: before it is read where its size is announced, and as soon as it passes the limit
  where it is not (chunked).
- All bodies together may take `_SHARED_BYTES`, or two of the largest: many large ones at once are turned away with 503.
- A client that stops sending is given up after a minute, and one that sends a little now and then soon after: what it
  makes the server hold must be paid for with bandwidth.

A body is refused without closing the connection: a client that is still sending would see a reset instead of the
answer. What it sends on is read and dropped by the protocol (see `http_protocol`), which also ends that some time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import APIError, BodyTooLarge, Unavailable
from server.request_context import current_request

_SHARED_BYTES = 1 << 30
_IDLE_SECONDS = 60.0
_SLOWEST = 8192
"""Bytes a second, of the whole body but its first minute."""


class BodyLimit:
    """`limit` gives the largest body in bytes. It is asked for each request: it follows from the model."""

    def __init__(self, app: ASGIApp, limit: Callable[[], int]) -> None:
        self._app = app
        self._limit = limit
        self._held = 0
        """Bytes of all bodies whose requests are neither released by their routes nor being answered yet."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._limit()
        announced = Headers(scope=scope).get("content-length", "0")
        if not announced.isdecimal() or len(announced) > 18 or int(announced) > limit:
            await _too_large(limit).response()(scope, receive, send)
            return
        body = _Body(self, limit, receive, send)
        context = current_request.get()
        if context is not None:
            context.release_body = body.release
        try:
            await self._app(scope, body.receive, body.send)
        except APIError:
            if body.error is None or body.response_started:
                raise
        finally:
            body.release()
        if body.error is not None and not body.response_started:
            await body.error.response()(scope, receive, send)

    def hold(self, size: int, limit: int) -> bool:
        """Count `size` more bytes; False where that is too much."""
        self._held += size
        return self._held <= max(_SHARED_BYTES, 2 * limit)

    def drop(self, size: int) -> None:
        self._held -= size


class _Body:
    """One request's body on its way to the application."""

    def __init__(self, owner: BodyLimit, limit: int, receive: Receive, send: Send) -> None:
        self.error: APIError | None = None
        self.response_started = False
        self._owner = owner
        self._limit = limit
        self._receive = receive
        self._send = send
        self._size = 0
        self._held = 0
        self._complete = False
        self._began = time.monotonic()

    async def receive(self) -> Message:
        """Raises APIError; whatever the application makes of it, `error` is what the client gets."""
        if self.error is not None:
            raise self.error
        if self._complete:
            return await self._receive()  # Only a disconnect can come, and it may take its time.
        try:
            async with asyncio.timeout(min(_IDLE_SECONDS, self._seconds_left())):
                message = await self._receive()
        except TimeoutError:
            self.error = APIError(408, "The request body did not arrive in time.", code="timeout")
            raise self.error from None
        size = len(message.get("body", b""))
        self._size += size
        self._held += size
        self._complete = not message.get("more_body", False)
        shared = self._owner.hold(size, self._limit)
        if self._size > self._limit:
            self.error = _too_large(self._limit)
        elif not shared:
            self.error = Unavailable("The server is reading too many large requests.", retry_after=1)
        if self.error is not None:
            raise self.error
        return message

    def _seconds_left(self) -> float:
        """Until what has come is too little for the time that it took."""
        return self._began + _IDLE_SECONDS + self._size / _SLOWEST - time.monotonic()

    async def send(self, message: Message) -> None:
        """The framework turns what is raised while it reads a body into errors of its own: they are dropped."""
        if self.response_started:
            await self._send(message)
        elif self.error is None:
            self.response_started = True
            self.release()
            await self._send(message)

    def release(self) -> None:
        self._owner.drop(self._held)
        self._held = 0


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"The request body is larger than {limit} bytes, the limit of this server.")
