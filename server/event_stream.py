"""A streamed answer: server-sent events as OpenAI's clients read them.

Every stream ends with `data: [DONE]`, also after an error: clients take a stream that merely stops for a complete one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.disconnect import ClientGone, unless_gone
from server.errors import APIError, InternalError, log_exception

_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect events otherwise
}
DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def event(body: Any) -> bytes:
    """One event. JSON has no bare line ends, so one `data:` line is enough."""
    return b"data: " + _encode(body) + b"\n\n"


class EventStream(Response):
    """`events`: encoded ones, without the final [DONE]. `close` is called once the stream is over, however it ends.
    `done`: what comes behind the last event."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], close: Callable[[], None], done: bytes = DONE) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers(_HEADERS)
        # Not a whole answer: its length is not known.
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._done = done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(send))
        except (ClientGone, OSError):  # OSError: what some servers raise when they send to nobody
            pass
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async with aclosing(self._events) as events:
                async for chunk in events:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            last = self._done
        except (asyncio.CancelledError, OSError):
            raise
        except APIError as error:
            error.note()
            last = event(error.body()) + self._done
        except Exception as error:
            log_exception(error)
            internal = InternalError()
            internal.note()
            last = event(internal.body()) + self._done
        await send({"type": "http.response.body", "body": last, "more_body": False})
