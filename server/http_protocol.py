"""uvicorn's HTTP parser with the limits that it lacks: on the size of a request's head and of its trailers, on a
connection that never sends one or never ends it, on how much of a refused body is read, and on how long an answer waits
to be read. What is malformed is answered in OpenAI's shape.

The head has to be limited here: by the time the application sees a request, its headers are in memory.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from server.answer_pieces import ANSWER_REST
from server.delivery import DELIVERY, Cut
from server.errors import APIError
from server.event_stream import BODY_WRITER
from server.no_upgrades import UpgradeFreeParser
from server.request_context import new_request_id
from server.slow_readers import PERIOD_SECONDS, SlowReader

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers together."""
MAX_HEADERS = 100
MAX_DROPPED_BYTES = 256 << 20
"""A refused body is read on and dropped, so that its sender sees the answer; but not without end."""
MAX_PIPELINED = 64
"""Requests that wait behind the one that is being answered. A single read may hold eight thousand."""
MAX_FRAMING = 8
"""Bytes around each byte of a chunked body, on average, and `MAX_HEAD_BYTES` more. Chunks of one byte have 5."""
_WHOLE_BYTES = 16 * 1024
"""Pieces of a body that are passed on without a copy."""
HEAD_SECONDS = 60.0
"""From a head's first bytes to its last ones. Keep-alive does not see it: its timer ends with the first byte."""


class LimitedHttpProtocol(HttpToolsProtocol):
    head_seconds = HEAD_SECONDS
    read_seconds = PERIOD_SECONDS
    """How long a connection may be full before its client has to have read something."""
    _slow_reader: SlowReader | None = None
    _head_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _in_head = False
    _in_body = False
    _answering: RequestResponseCycle | None = None
    """The request whose turn it is. `cycle` is the one that came last."""
    _messages = 0
    _body_bytes = 0
    """Of all requests of the connection."""
    _dropped_bytes = 0
    _framing_room = 0
    _cut: Cut | None = None
    """Why the connection ends with something unwritten."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        writes: Writes | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._no_upgrades = UpgradeFreeParser(self.parser, self)
        self.parser = self._no_upgrades  # type: ignore[assignment]
        self.writes = Writes(self.loop) if writes is None else writes
        self.on_writable: Callable[[], None] | None = None
        """Called when the client has read what had made the connection full."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._slow_reader = SlowReader(transport, self.read_seconds, self._not_read)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        was_in_head, was_in_body = self._in_head, self._in_body
        message, body_bytes = self._messages, self._body_bytes
        super().data_received(data)
        if was_in_body and self._in_body and message == self._messages:
            self._count_body(len(data), self._body_bytes - body_bytes)
        # All of it was head, and is inside the parser now. (Data in which a head begins may be a body for the rest.)
        if was_in_head and self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse_head()
        # Without a head: empty lines, which the parser passes over.
        if (self._in_head or not (self._in_body or self._is_answering())) and not self.transport.is_closing():
            self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        if self._slow_reader is not None:
            self._slow_reader.stop()
        if exc is not None and self._cut is None:
            self._cut = Cut.CLIENT_LEFT
        super().connection_lost(exc)
        if self._answering is not None and not self._answering.response_complete:
            self._tell_gone(self._answering)  # uvicorn tells only the one that came last.
        self.pipeline.clear()

    def on_message_begin(self) -> None:
        if self._no_upgrades.is_resuming:
            return
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0
        self._messages += 1
        self._dropped_bytes = 0
        self._framing_room = MAX_HEAD_BYTES

    def on_url(self, url: bytes) -> None:
        if not self._no_upgrades.is_resuming:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        # Not the trailers behind a chunked body: uvicorn would add them to the headers that the application has seen.
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._no_upgrades.is_resuming:
            return
        self._in_head = False
        self._in_body = True
        self._stop_head_timer()
        if self.transport.is_closing():
            return
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            self._refuse_head()
        elif len(self.pipeline) >= MAX_PIPELINED:
            self._refuse(APIError(400, f"More than {MAX_PIPELINED} requests wait here.", code="invalid_http"))
        else:
            super().on_headers_complete()
            if not self.pipeline:
                self._answering = self.cycle
            self._offer_writer()
            if self.scope["http_version"] == "1.0":
                self.cycle.send = Unframed(self.cycle).send  # type: ignore[method-assign]

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if not self.transport.is_closing():
            self._spare_copies(len(body))
            super().on_body(body)

    def _spare_copies(self, size: int) -> None:
        """uvicorn adds to a bytearray and makes bytes of it for the application: two copies of every byte. What comes
        alone between two reads of the application's, as large pieces do, is passed on as it is: adding to empty bytes
        and making bytes of bytes copy nothing."""
        cycle: Any = self.cycle
        if not cycle.body and size >= _WHOLE_BYTES:
            cycle.body = b""
        elif isinstance(cycle.body, bytes):
            cycle.body = bytearray(cycle.body)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.on_writable is not None:
            self.on_writable()

    def _offer_writer(self) -> None:
        """To the application, whose task has not begun to run yet."""
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and cycle.scope is self.scope:
            extensions: dict[str, Any] = {BODY_WRITER: CycleWriter(self, cycle), DELIVERY: CycleDelivery(self, cycle)}
            if self._slow_reader is not None:
                extensions[ANSWER_REST] = self._slow_reader.owe
            self.scope["extensions"] = extensions

    def on_message_complete(self) -> None:
        if self._no_upgrades.holds_end:
            return
        self._in_body = False
        if not self.transport.is_closing():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        following = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        if following is not None:
            self._answering = following

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._slow_reader is not None:
            self._slow_reader.on_full()

    def timeout_keep_alive_handler(self) -> None:
        """Closing waits for what is still to be written, and so for a client that reads."""
        super().timeout_keep_alive_handler()
        if self._slow_reader is not None:
            self._slow_reader.on_full()

    def send_400_response(self, msg: str) -> None:
        self._refuse(APIError(400, msg, code="invalid_http"))

    def _count_body(self, received: int, body: int) -> None:
        """Of `received` bytes `body` were body. The rest frames its chunks, and what may stand there (extensions,
        trailers) has neither a length of its own nor a limit in the parser."""
        if self.transport.is_closing():
            return
        self._framing_room += MAX_FRAMING * body - (received - body)
        if self.cycle.response_complete:
            self._dropped_bytes += received
            if self._dropped_bytes > MAX_DROPPED_BYTES:
                self.transport.abort()
        elif self._framing_room < 0:
            self._refuse(APIError(400, "The request's chunks carry too much beside the body.", code="invalid_http"))

    def _is_answering(self) -> bool:
        return self._answering is not None and not self._answering.response_complete

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_seconds, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._is_answering():
            self._start_head_timer()  # A request ahead of its time must not end the one before it.
            return
        self._refuse(APIError(408, "The request's headers did not arrive in time.", code="timeout"))

    def _refuse_head(self) -> None:
        limits = f"{MAX_HEADERS} headers and {MAX_HEAD_BYTES} bytes in all"
        self._refuse(APIError(431, f"The request's headers are too large: at most {limits}.", code="headers_too_large"))

    def _refuse(self, error: APIError) -> None:
        """Answer without the application, and close. Where the application has begun to answer, only close."""
        if self.transport.is_closing():
            return
        cycle = self._answering
        if cycle is None or cycle.response_complete or not cycle.response_started:
            body = json.dumps(error.body()).encode()
            head = [
                STATUS_LINE[error.status],
                *(b"%b: %b\r\n" % header for header in self.server_state.default_headers),
                b"content-type: application/json\r\n",
                b"content-length: %d\r\n" % len(body),
                b"x-request-id: %b\r\n" % new_request_id().encode(),
                b"connection: close\r\n\r\n",
            ]
            self.transport.write(b"".join(head) + body)
        if cycle is not None and not cycle.response_complete:
            self._cut = Cut.INVALID_HTTP
            self._tell_gone(cycle)
        self.transport.close()

    def _not_read(self) -> None:
        self._cut = Cut.NOT_READ
        self.transport.abort()

    @property
    def cut(self) -> Cut | None:
        return self._cut

    @staticmethod
    def _tell_gone(cycle: RequestResponseCycle) -> None:
        """Nothing more is written for it, and whoever reads its body or waits for its end is told."""
        cycle.disconnected = True
        cycle.message_event.set()


class Writes:
    """What is going to be written to the connections of one event loop, all of it together once nothing else is waiting
    to run. A step's tokens become events first and are written then: system calls in a row take less time than as
    many with Python in between, and a client in the same machine is woken up less often."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[tuple[CycleWriter, bytes]] = []

    def add(self, writer: CycleWriter, data: bytes) -> None:
        if not self._waiting:
            self._loop.call_soon(self.flush)
        self._waiting.append((writer, data))

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for writer, data in waiting:
            writer.write_now(data)


class CycleWriter:
    """`event_stream.BodyWriter`: parts of a chunked response, written as `RequestResponseCycle.send` writes them."""

    __slots__ = ("_cycle", "_flow", "_num_unwritten", "_protocol", "_transport", "_writes")

    def __init__(self, protocol: LimitedHttpProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol, self._cycle = protocol, cycle
        self._flow, self._transport, self._writes = cycle.flow, cycle.transport, protocol.writes
        self._num_unwritten = 0

    @property
    def on_writable(self) -> Callable[[], None] | None:
        return self._protocol.on_writable

    @on_writable.setter
    def on_writable(self, call: Callable[[], None] | None) -> None:
        self._protocol.on_writable = call  # of a connection's requests only one is being answered

    @property
    def is_full(self) -> bool:
        return self._flow.write_paused

    @property
    def is_idle(self) -> bool:
        return not self._num_unwritten and not self._flow.write_paused

    def write(self, data: bytes) -> None:
        self._num_unwritten += 1
        self._writes.add(self, data)

    async def flush(self) -> None:
        self._writes.flush()

    def write_now(self, data: bytes) -> None:
        self._num_unwritten -= 1
        # Writing to a closed one raises, and what others are to be sent waits behind this.
        if data and not self._cycle.disconnected and not self._transport.is_closing():
            is_chunked = self._cycle.chunked_encoding
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if is_chunked else data)


class CycleDelivery:
    """`delivery.Delivery`."""

    __slots__ = ("_cycle", "_protocol")

    def __init__(self, protocol: LimitedHttpProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol, self._cycle = protocol, cycle

    @property
    def cut(self) -> Cut | None:
        cycle = self._cycle
        # Closing: its loss is known and will be told in the loop's next turn. (Behind an answer we close it ourselves.)
        if cycle.disconnected or (cycle.transport.is_closing() and not cycle.response_complete):
            return self._protocol.cut or Cut.CLIENT_LEFT
        return None

    async def sent(self) -> Cut | None:
        flow = self._cycle.flow
        if self.cut is None and flow.write_paused:
            await flow.drain()
            return self._protocol.cut
        return self.cut


class Unframed:
    """`RequestResponseCycle.send` for HTTP/1.0, which knows no chunks: an answer of unknown length is written as it is
    and ends with the connection. (uvicorn would send chunks, and their sizes would be read as content.)"""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._send = cycle, cycle.send
        self._is_unframed = False

    async def send(self, message: Any) -> None:
        cycle = self._cycle
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            has_body = not cycle.response_started and cycle.scope["method"] != "HEAD"
            self._is_unframed = has_body and not names & {b"content-length", b"transfer-encoding"}
            if self._is_unframed:
                # Of what is a head only, uvicorn neither frames nor writes a body.
                cycle.scope = {**cycle.scope, "method": "HEAD"}
        elif self._is_unframed and (body := message.get("body", b"")):
            await cycle.flow.drain()
            if not cycle.disconnected and not cycle.transport.is_closing():
                cycle.transport.write(body)
        await self._send(message)
