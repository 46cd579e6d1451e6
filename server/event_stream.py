"""A streamed answer: server-sent events as OpenAI's clients read them.

The engine's news call `_Pump.run` directly, which writes what they have become to the connection: no coroutine is
resumed between a token and its event, and nothing is sent through the layers around the application, which see a
response begin and end. Where the client reads too slowly, tokens stay where they are and are merged.

Most tokens are a piece of text and nothing else. `_PlainTokens` writes them as the engine client gets them: between two
steps the caches have forgotten every stream, and what a token costs is above all how much memory is touched for it.

A stream ends with `data: [DONE]` also after an error: clients take one that merely stops for a complete one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.answer import Answer
from server.choices import Choice, Delta
from server.disconnect import ClientGone, unless_gone
from server.errors import APIError, InternalError, log_exception

_encode = msgspec.json.Encoder().encode

BODY_WRITER = "intarsia.body_writer"
"""The extension of ASGI by which the protocol (see `http_protocol`) offers its `BodyWriter`."""

_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect events otherwise
}
_INLINE_RECORDS = 512
"""Tokens with log-probabilities that are encoded in place: a few milliseconds."""
_EVENTS_PER_CALL = 64
"""Of the engine's; after so many the loop gets a turn, however many choices an answer has."""


class BodyWriter(Protocol):
    """The connection, between a response's start and its last part, which go the usual way."""

    on_writable: Callable[[], None] | None
    """Called when the connection takes more, after it was full."""

    @property
    def is_full(self) -> bool:
        """Whether to wait for `on_writable`."""

    @property
    def is_idle(self) -> bool:
        """Not full, and whatever was given to it is written."""

    def write(self, data: bytes) -> None:
        """At the end of the loop's turn, or with `flush`. Never waits. What nobody reads any more is dropped."""

    async def flush(self) -> None:
        """Called before anything is sent the usual way."""


class Events(Protocol):
    """How an endpoint writes the events of one answer."""

    def begin(self) -> bytes:
        """What comes before the first delta's."""

    def frame(self, index: int) -> tuple[bytes, bytes] | None:
        """What stands around the text, which is JSON, in the event of a delta that has nothing but a text; None: that
        differs from event to event."""

    def encode(self, delta: Delta) -> bytes: ...

    async def end(self) -> bytes:
        """What comes behind the last delta's."""

    def fail(self, error: APIError) -> bytes:
        """The same, where there is an error instead of an end."""


class EventStream(Response):
    """`answer` is closed once the stream is over, however it ends."""

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, events: Events) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers(_HEADERS)
        # Not a whole answer: its length is not known.
        del self.headers["content-length"]
        self._answer = answer
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            writer = scope.get("extensions", {}).get(BODY_WRITER) or _SendingWriter(send)
            await unless_gone(receive, self._send_all(writer, send))
        except (ClientGone, OSError):  # OSError: what some servers raise when they send to nobody
            pass
        finally:
            self._answer.close()

    async def _send_all(self, writer: BodyWriter, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            writer.write(self._events.begin())
            await _Pump(self._answer, self._events, writer).finished()
            last = await self._events.end()
        except (asyncio.CancelledError, OSError):
            raise
        except APIError as error:
            error.note()
            last = self._events.fail(error)
        except Exception as error:
            log_exception(error)
            internal = InternalError()
            internal.note()
            last = self._events.fail(internal)
        await writer.flush()
        await send({"type": "http.response.body", "body": last, "more_body": False})


class _SendingWriter:
    """`BodyWriter` in the usual way, where the application runs behind another protocol than ours."""

    def __init__(self, send: Send) -> None:
        self.on_writable: Callable[[], None] | None = None
        self._send = send
        self._waiting: list[bytes] = []
        self._sending: asyncio.Task[None] | None = None

    @property
    def is_full(self) -> bool:
        return self._sending is not None

    @property
    def is_idle(self) -> bool:
        return self._sending is None

    def write(self, data: bytes) -> None:
        if data:
            self._waiting.append(data)
            if self._sending is None:
                self._sending = asyncio.create_task(self._send_waiting())

    async def flush(self) -> None:
        if self._sending is not None:
            await self._sending

    async def _send_waiting(self) -> None:
        with contextlib.suppress(OSError):  # nobody reads it any more
            while self._waiting:
                body, self._waiting = b"".join(self._waiting), []
                await self._send({"type": "http.response.body", "body": body, "more_body": True})
        self._sending = None
        if self.on_writable is not None:
            self.on_writable()


class _PlainTokens:
    """Writes tokens whose text is all that is new. Everything that it needs, and no more, is in one place."""

    __slots__ = ("_after", "_before", "_choice", "_end", "_texts", "_writer")

    def __init__(
        self,
        choice: Choice,
        texts: Mapping[int, str | None],
        frame: tuple[bytes, bytes],
        writer: BodyWriter,
        end: asyncio.Future[None],
    ) -> None:
        self._before, self._after = frame
        self._choice, self._texts, self._writer, self._end = choice, texts, writer, end

    def write(self, token: int) -> bool:
        """`generation.Direct`. Of several tokens that have come together only the first: the others are merged."""
        text = self._texts.get(token)
        if not text or not self._writer.is_idle:
            return False
        try:
            self._choice.num_tokens += 1
            self._writer.write(self._before + _encode(text) + self._after)
        except Exception as error:  # The engine client has other streams' tokens to hand out.
            if not self._end.done():
                self._end.set_exception(error)
        return True


class _Pump:
    """Takes an answer's deltas and writes their events as they come."""

    def __init__(self, answer: Answer, events: Events, writer: BodyWriter) -> None:
        self._answer = answer
        self._events = events
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()
        self._end: asyncio.Future[None] = self._loop.create_future()
        self._encoding: asyncio.Task[None] | None = None
        """What a thread is at."""

    async def finished(self) -> None:
        """Until the answer is complete. Raises APIError, and whatever a fault of ours raises."""
        self._writer.on_writable = self._run_soon
        self._answer.listen(self.run)
        try:
            await self._end
        finally:
            self._answer.listen(None)
            self._writer.on_writable = None
            if self._encoding is not None:
                self._encoding.cancel()

    def run(self) -> None:
        """Called when there is news of the answer, or room for it."""
        if self._writer.is_full or self._encoding is not None or self._end.done():
            return
        pieces: list[bytes] = []
        try:
            self._collect(pieces)
        except Exception as error:
            self._end.set_exception(error)
        if pieces:
            self._writer.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        is_encoding = self._encoding is not None
        if is_encoding or self._end.done():
            return
        if self._answer.is_complete:
            self._end.set_result(None)
        else:
            self._take_directly()

    def _take_directly(self) -> None:
        """If the next tokens are likely to be texts and nothing else."""
        choice = self._answer.plain_choice
        texts = None if choice is None else choice.texts
        frame = None if choice is None else self._events.frame(choice.index)
        if choice is not None and texts is not None and frame is not None:
            self._answer.take_directly(_PlainTokens(choice, texts, frame, self._writer, self._end).write)

    def _collect(self, pieces: list[bytes]) -> None:
        encode = self._events.encode
        for _ in range(_EVENTS_PER_CALL):
            deltas = self._answer.take()
            if deltas is None:
                return
            for delta in deltas:
                records = 0 if delta.hidden is None else delta.hidden.num_records
                if len(delta.tokens) + len(delta.prompt) + records > _INLINE_RECORDS:
                    self._encoding = self._loop.create_task(self._encode_in_thread(deltas))
                    return
            pieces += map(encode, deltas)
        self._run_soon()

    async def _encode_in_thread(self, deltas: Sequence[Delta]) -> None:
        """The event loop would be late for others."""
        try:
            self._writer.write(await asyncio.to_thread(lambda: b"".join(map(self._events.encode, deltas))))
        except Exception as error:
            self._end.set_exception(error)
        self._encoding = None
        self.run()

    def _run_soon(self) -> None:
        self._loop.call_soon(self.run, context=self._context)


def event(body: Any) -> bytes:
    """One event. JSON has no bare line ends, so one `data:` line is enough."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
