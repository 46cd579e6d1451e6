"""Clients that take their answers slowly, or not at all, from a real connection in either kind of loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
import uvloop
from starlette.types import Message, Receive, Scope, Send

from server.answer_pieces import PIECE_BYTES, pieces_of
from server.http_protocol import LimitedHttpProtocol
from server.listener import bind

PERIOD = 0.3
REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
PIECE = bytes(16 << 10)


class Served:
    """What the application saw of the one request."""

    def __init__(self, pieces: int, piece: bytes = PIECE) -> None:
        self.sent = 0
        self.gone = asyncio.Event()
        self._pieces = pieces
        self._piece = piece

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watching = asyncio.create_task(self._watch(receive))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for index in range(self._pieces):
            more = index + 1 < self._pieces
            await send({"type": "http.response.body", "body": self._piece, "more_body": more})
            self.sent += len(self._piece)
        await watching

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone.set()


async def never_read(connection: socket.socket) -> None: ...


async def serve(app: Served, client: Callable[[socket.socket], Coroutine[Any, Any, None]], *, cut: bool = True) -> None:
    """`cut`: wait until the server has given the connection up."""
    with bind("127.0.0.1", 0) as listener, socket.socket() as connection:
        config = uvicorn.Config(app, http=LimitedHttpProtocol, lifespan="off", log_config=None, timeout_keep_alive=1)
        http = uvicorn.Server(config)
        serving = asyncio.create_task(http._serve([listener]))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, listener.getsockname())
        await loop.sock_sendall(connection, REQUEST)
        try:
            async with asyncio.timeout(30):  # else it would seem to be gone before it is there
                while not http.server_state.connections:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            await client(connection)
            async with asyncio.timeout(30):
                while cut and http.server_state.connections:  # noqa: ASYNC110 - nothing to wait for sets an event
                    await asyncio.sleep(PERIOD / 10)
        finally:
            http.should_exit = http.force_exit = True
            connection.close()
            await serving


@pytest.fixture(params=[uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Coroutine[Any, Any, None]], None]:
    monkeypatch.setattr(LimitedHttpProtocol, "read_seconds", PERIOD)

    def run(scenario: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(asyncio.wait_for(scenario, 60))

    return run


class Periods:
    """In the place of the event loop that `slow_readers` asks for timers: a period is over when the test says so. Who
    reads something in each must not be cut, and a machine may have other things to do for longer than any period."""

    def __init__(self) -> None:
        self.looks = 0
        self._timers: list[Callable[[], None]] = []

    def get_running_loop(self) -> Periods:
        return self

    def call_later(self, seconds: float, call: Callable[[], None]) -> SimpleNamespace:
        assert seconds == PERIOD
        self._timers.append(call)
        return SimpleNamespace(cancel=partial(self._timers.remove, call))

    async def end_one(self) -> None:
        """When the kernels have told each other what has been read."""
        await asyncio.sleep(0.05)
        timers, self._timers[:] = self._timers[:], []
        for call in timers:
            self.looks += 1
            call()


@pytest.fixture
def periods(monkeypatch: pytest.MonkeyPatch) -> Periods:
    periods = Periods()
    monkeypatch.setattr("server.slow_readers.asyncio", periods)
    return periods


def test_who_never_reads_a_stream_is_cut(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    async def scenario() -> None:
        app = Served(10_000)
        await serve(app, never_read)
        assert app.gone.is_set()

    run(scenario())


def test_a_stream_waits_for_its_reader(run: Callable[[Coroutine[Any, Any, None]], None], periods: Periods) -> None:
    """What is held for a client that does not read is bounded, though the answer is not."""

    async def scenario() -> None:
        app = Served(10_000)

        async def look(_: socket.socket) -> None:
            before = -1
            async with asyncio.timeout(30):
                while not app.sent or app.sent != before:
                    before = app.sent
                    await asyncio.sleep(PERIOD / 3)
            assert app.sent < 4 << 20

        await serve(app, look, cut=False)

    run(scenario())


def test_who_reads_slowly_gets_it_all(run: Callable[[Coroutine[Any, Any, None]], None], periods: Periods) -> None:
    async def scenario() -> None:
        app = Served(1, bytes(3 << 20))

        async def read_slowly(connection: socket.socket) -> None:
            """In several periods, in each a part."""
            loop = asyncio.get_running_loop()
            for _ in range(3 << 2):
                left = 256 << 10
                while left > 0:
                    read = len(await loop.sock_recv(connection, left))
                    assert read, "cut"
                    left -= read
                await periods.end_one()

        await serve(app, read_slowly, cut=False)
        assert periods.looks > 5

    run(scenario())


def test_who_never_reads_a_whole_answer_is_cut(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    async def scenario() -> None:
        await serve(Served(1, bytes(6 << 20)), never_read)

    run(scenario())


class InPieces(Served):
    """Sends one answer as `request_log` does."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_pieces(message: Message) -> None:
            for piece in pieces_of(message, scope):
                await send(piece)

        await super().__call__(scope, receive, send_pieces)


async def read(connection: socket.socket, size: int) -> int:
    """Reads `size` bytes, fewer only where there are no more; how many."""
    loop, got = asyncio.get_running_loop(), 0
    with contextlib.suppress(ConnectionError):
        while got < size and (data := await loop.sock_recv(connection, size - got)):
            got += len(data)
    return got


def test_who_reads_a_little_of_an_answer_in_pieces_is_cut(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    """So that a piece or two go out in each period. What is held for the client is all of the answer."""
    size = 64 << 20

    async def scenario() -> None:
        app = InPieces(1, bytes(size))

        async def read_little(connection: socket.socket) -> None:
            got = 0
            async with asyncio.timeout(30):
                while part := await read(connection, PIECE_BYTES):
                    got += part
                    await asyncio.sleep(PERIOD / 2)
            assert got < size // 2

        await serve(app, read_little)
        assert app.gone.is_set()

    run(scenario())


def test_who_reads_an_answer_in_pieces_slowly_gets_it_all(
    run: Callable[[Coroutine[Any, Any, None]], None], periods: Periods
) -> None:
    size = 24 << 20

    async def scenario() -> None:
        app = InPieces(1, bytes(size))

        async def read_slowly(connection: socket.socket) -> None:
            for _ in range(12):
                assert await read(connection, size // 12) == size // 12, "cut"
                await periods.end_one()

        await serve(app, read_slowly, cut=False)
        assert periods.looks > 5

    run(scenario())


def test_closing_does_not_wait_for_who_never_reads(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    """What is left is below the mark from which a connection counts as full."""

    async def scenario() -> None:
        app = Served(1, bytes(2 << 20))

        async def read_most(connection: socket.socket) -> None:
            loop = asyncio.get_running_loop()
            await asyncio.sleep(PERIOD / 2)
            left = 100 << 10
            while left > 0:
                left -= len(await loop.sock_recv(connection, left))

        await serve(app, read_most)

    run(scenario())


def test_connections_are_asked_whether_they_are_there() -> None:
    with (
        bind("127.0.0.1", 0, silent_seconds=12) as listener,
        socket.create_connection(listener.getsockname()) as client,
    ):
        listener.setblocking(True)
        connection, _ = listener.accept()
        with connection:
            tcp = socket.IPPROTO_TCP
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert connection.getsockopt(tcp, socket.TCP_KEEPIDLE) == 6
            assert connection.getsockopt(tcp, socket.TCP_KEEPINTVL) == 2
            assert connection.getsockopt(tcp, socket.TCP_USER_TIMEOUT) == 12_000
            assert connection.getsockopt(tcp, socket.TCP_NODELAY) == 1
        assert client.recv(1) == b""
