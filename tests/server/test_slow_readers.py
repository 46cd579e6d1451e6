"""Clients that take their answers slowly, or not at all, from a real connection in either kind of loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send

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
            await client(connection)
            async with asyncio.timeout(20):
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
            runner.run(asyncio.wait_for(scenario, 30))

    return run


def test_who_never_reads_a_stream_is_cut(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    async def scenario() -> None:
        app = Served(10_000)
        await serve(app, never_read)
        assert app.gone.is_set()

    run(scenario())


def test_a_stream_waits_for_its_reader(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    """What is held for a client that does not read is bounded, though the answer is not."""

    async def scenario() -> None:
        app = Served(10_000)

        async def look(_: socket.socket) -> None:
            await asyncio.sleep(PERIOD / 3)
            before = app.sent
            await asyncio.sleep(PERIOD / 3)
            assert app.sent == before < 4 << 20

        await serve(app, look, cut=False)

    run(scenario())


def test_who_reads_slowly_gets_it_all(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
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
                await asyncio.sleep(PERIOD / 2)

        await serve(app, read_slowly, cut=False)

    run(scenario())


def test_who_never_reads_a_whole_answer_is_cut(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    async def scenario() -> None:
        await serve(Served(1, bytes(6 << 20)), never_read)

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
