"""One HTTP/1.1 connection that hands every piece of an answer to a callback as it comes in.

Used by `load` in place of httpx, which this project uses elsewhere. On the machine where both were measured httpx costs
75 to 87 µs of CPU per streamed event (an async generator in each of its layers), this 7 to 12 µs, both with the event's
JSON decoded (`python -m tests.bench.client_rate`). 30,000 tokens a second would take httpx more than two of the cores
that the server needs too, and its events would be stamped late; here it takes a third of one. Parsing is left to
httptools, which uvicorn uses on the other side.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpResponseParser

Clock = Callable[[], float]

MAX_HEAD_BYTES = 256 << 10
"""What an answer's head may take before it counts as broken."""


class CallFailed(Exception):
    """No whole answer came. `kind` is a short name that errors are counted by, `detail` a sentence about this one."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


class ResponseSink(Protocol):
    """Takes an answer's parts, in order. `now`: when the piece was read from the socket, by the connection's clock."""

    def on_status(self, status: int, now: float) -> None: ...

    def on_body(self, data: bytes, now: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go: `base_url` taken apart."""

    host: str
    port: int
    prefix: str
    """The path before `/v1/…`: empty, or begins with a slash."""
    tls: bool
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, base_url: str, api_key: str | None = None) -> Target:
        """Raises ValueError, with a sentence for the user."""
        try:
            url = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
            port = url.port
        except ValueError as error:
            raise ValueError(f"{base_url!r} is not a URL: {error}") from None
        if url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment or url.username:
            raise ValueError(f"{base_url!r} is not the URL of a server: write http://HOST:PORT")
        if not url.path.isascii() or any(character <= " " for character in url.path + url.netloc):
            raise ValueError(f"{base_url!r} has characters that a URL can't have")
        tls = url.scheme == "https"
        prefix = url.path.rstrip("/").removesuffix("/v1")
        if api_key is not None and (not api_key.isascii() or not api_key.isprintable()):
            raise ValueError("the API key has characters that a header can't have")
        headers = (("Authorization", f"Bearer {api_key}"),) if api_key is not None else ()
        return cls(url.hostname, port or (443 if tls else 80), prefix, tls, headers)

    def head(self, method: str, path: str, body_bytes: int, content_type: str = "application/json") -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"{method} {self.prefix}{path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "Accept: text/event-stream, application/json",
            "User-Agent: intarsia-bench",
            *(f"{name}: {value}" for name, value in self.headers),
        ]
        if method == "POST":
            lines += [f"Content-Type: {content_type}", f"Content-Length: {body_bytes}"]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")


class HttpConnection:
    """Connects when it is first used, and again when the server has hung up in between. One call at a time."""

    def __init__(self, target: Target, *, clock: Clock = time.perf_counter, connect_timeout: float = 30.0) -> None:
        self._target = target
        self._clock = clock
        self._connect_timeout = connect_timeout
        self._protocol: _Exchange | None = None

    async def call(
        self, method: str, path: str, body: Sequence[bytes], sink: ResponseSink, content_type: str = "application/json"
    ) -> None:
        """Send a request, `body` in as many pieces as there are, and feed the whole answer to `sink`.

        Raises CallFailed, and whatever `sink` raises. The connection is then closed, as it is when this is cancelled.
        """
        request = [self._target.head(method, path, sum(map(len, body)), content_type), *body]
        reused = self._protocol is not None and self._protocol.is_usable
        try:
            try:
                await self._once(request, sink)
            except CallFailed as error:
                # An idle connection may have been closed while the request was on its way to it.
                if not reused or error.kind != "disconnected":
                    raise
                self.close()
                await self._once(request, sink)
        except BaseException:
            self.close()
            raise

    async def _once(self, request: Sequence[bytes], sink: ResponseSink) -> None:
        if self._protocol is None or not self._protocol.is_usable:
            self.close()
            self._protocol = await self._connect()
        await self._protocol.exchange(request, sink)

    async def _connect(self) -> _Exchange:
        loop = asyncio.get_running_loop()
        target = self._target
        tls = _tls() if target.tls else None
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, protocol = await loop.create_connection(
                    lambda: _Exchange(self._clock), target.host, target.port, ssl=tls
                )
        except TimeoutError:
            raise CallFailed("connect_timeout", f"no connection within {self._connect_timeout:g} s") from None
        except ConnectionRefusedError:
            raise CallFailed("connection_refused", f"{target.host}:{target.port} refuses connections") from None
        except OSError as error:
            raise CallFailed("connection_failed", f"can't connect to {target.host}:{target.port}: {error}") from None
        return protocol

    def close(self) -> None:
        if self._protocol is not None:
            self._protocol.close()
            self._protocol = None


@functools.cache
def _tls() -> ssl.SSLContext:
    """One for all connections: reading the machine's certificates takes tens of milliseconds."""
    return ssl.create_default_context()


@dataclass(slots=True)
class _State:
    """Of the answer that is being read."""

    sink: ResponseSink
    done: asyncio.Future[None]
    parser: HttpResponseParser
    has_status: bool = False
    is_framed: bool = False
    """Whether its end can be seen; else the end of the connection is the answer's."""
    head_bytes: int = 0
    error: Exception | None = None
    """What the sink raised."""


class _Exchange(asyncio.Protocol):
    """Both the connection's protocol and the parser's callbacks."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._state: _State | None = None
        self._now = 0.0
        self.is_usable = False

    async def exchange(self, request: Sequence[bytes], sink: ResponseSink) -> None:
        assert self._transport is not None and self._state is None  # noqa: S101 - one call at a time
        done = asyncio.get_running_loop().create_future()
        self._state = _State(sink, done, HttpResponseParser(self))
        self._transport.writelines(request)
        try:
            await done
        finally:
            self._state = None

    def close(self) -> None:
        self.is_usable = False
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio's side ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by inheritance
        self.is_usable = True

    def data_received(self, data: bytes) -> None:
        state = self._state
        if state is None or state.done.done():
            self.close()  # an answer that nobody asked for
            return
        self._now = self._clock()
        if not state.has_status:
            state.head_bytes += len(data)
            if state.head_bytes > MAX_HEAD_BYTES:
                self._fail(CallFailed("bad_response", "the answer's head is too long"))
                return
        try:
            state.parser.feed_data(data)
        except HttpParserError as error:  # also around what a callback raises
            self._fail(state.error or CallFailed("bad_response", f"not HTTP/1.1: {type(error).__name__}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_usable = False
        state = self._state
        if state is None or state.done.done():
            return
        if not state.has_status:
            self._fail(CallFailed("disconnected", "the server hung up before it answered"))
        elif state.is_framed or exc is not None:
            self._fail(CallFailed("truncated", "the server hung up in the middle of its answer"))
        else:
            state.done.set_result(None)

    def _fail(self, error: BaseException) -> None:
        state = self._state
        if state is not None and not state.done.done():
            state.done.set_exception(error)
        self.close()

    # --- httptools' side --------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self._state is not None  # noqa: S101
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._state.is_framed = True

    def on_headers_complete(self) -> None:
        state = self._state
        assert state is not None  # noqa: S101
        status = state.parser.get_status_code()
        if status >= 200:  # 1xx: the real one follows
            state.has_status = True
            state.sink.on_status(status, self._now)

    def on_body(self, data: bytes) -> None:
        state = self._state
        assert state is not None  # noqa: S101
        try:
            state.sink.on_body(data, self._now)
        except Exception as error:
            state.error = error
            raise

    def on_message_complete(self) -> None:
        state = self._state
        assert state is not None  # noqa: S101
        if not state.has_status:
            return
        if not state.parser.should_keep_alive():
            self.close()
        if not state.done.done():
            state.done.set_result(None)
