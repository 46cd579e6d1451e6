"""One connection against a server that is scripted byte by byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvloop

from server.bench.http_connection import MAX_HEAD_BYTES, CallFailed, HttpConnection, Target
from tests.server.bench.scripted_http import LAST_CHUNK, STREAM_HEAD, Exchange, Script, Ticks, chunk, serving, whole


@dataclass
class Seen:
    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)

    def on_status(self, status: int, now: float) -> None:
        self.status = status

    def on_body(self, data: bytes, now: float) -> None:
        self.pieces.append((now, data))

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.pieces)


def run(work: Coroutine[Any, Any, None], *, with_uvloop: bool = False) -> None:
    (uvloop.run if with_uvloop else asyncio.run)(asyncio.wait_for(work, 20))


def failing(script: Script) -> CallFailed:
    failures = []

    async def main() -> None:
        async with serving(script) as served:
            connection = HttpConnection(served.target)
            with pytest.raises(CallFailed) as failed:
                await connection.call("POST", "/v1/completions", (b"{}",), Seen())
            failures.append(failed.value)
            connection.close()

    run(main())
    return failures[0]


@pytest.mark.parametrize("with_uvloop", [False, True])
def test_pieces_with_their_times(with_uvloop: bool) -> None:
    clock = Ticks()

    async def script(exchange: Exchange) -> None:
        """What has not been read yet would be read together with the next."""
        for piece in (STREAM_HEAD, chunk(b"one"), chunk(b"two") + chunk(b"three")):
            before = clock.now
            await exchange.send(piece)
            while clock.now == before:  # noqa: ASYNC110 - a clock sets no event
                await asyncio.sleep(0.001)
        await exchange.send(LAST_CHUNK)

    async def main() -> None:
        async with serving(script) as served:
            connection, seen = HttpConnection(served.target, clock=clock), Seen()
            await connection.call("POST", "/x", (b"[1", b",2]"), seen)
            connection.close()
            assert seen.status == 200
            # One reading of the clock for each read of the socket: the head, then the rest.
            assert seen.pieces == [(2.0, b"one"), (3.0, b"two"), (3.0, b"three")]
            (exchange,) = served.exchanges
            assert json.loads(exchange.body) == [1, 2]
            assert exchange.head.startswith(b"POST /x HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n" % served.port)

    run(main(), with_uvloop=with_uvloop)


def test_a_connection_is_used_again() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.send(whole(200, b"%d" % exchange.number))

    async def main() -> None:
        async with serving(script) as served:
            connection = HttpConnection(served.target)
            for number in range(3):
                seen = Seen()
                await connection.call("GET", "/", (), seen)
                assert seen.body == b"%d" % number
            assert served.connections == 1
            connection.close()

    run(main())


def test_a_connection_that_was_closed_while_idle_is_opened_again() -> None:
    """Whether the end is noticed before the next request or only after it was sent."""

    async def script(exchange: Exchange) -> None:
        if exchange.number == 0:
            await exchange.send(whole(200, b"ok"))
        else:
            exchange.writer.transport.abort()

    async def main() -> None:
        async with serving(script) as served:
            connection = HttpConnection(served.target)
            for expected in (1, 2, 3):
                seen = Seen()
                await connection.call("GET", "/", (), seen)
                assert (seen.body, served.connections) == (b"ok", expected)
            connection.close()

    run(main())


def test_a_new_connection_that_fails_is_not_tried_again() -> None:
    async def script(exchange: Exchange) -> None:
        exchange.hang_up()

    async def main() -> None:
        async with serving(script) as served:
            connection = HttpConnection(served.target)
            with pytest.raises(CallFailed) as failed:
                await connection.call("POST", "/", (b"{}",), Seen())
            assert (failed.value.kind, served.connections) == ("disconnected", 1)

    run(main())


def test_connection_close_is_obeyed() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok")

    async def main() -> None:
        async with serving(script) as served:
            connection = HttpConnection(served.target)
            for expected in (1, 2):
                await connection.call("GET", "/", (), Seen())
                assert served.connections == expected
            connection.close()

    run(main())


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\n\r\n", b"all ", b"of it")
        exchange.hang_up()

    async def main() -> None:
        async with serving(script) as served:
            connection, seen = HttpConnection(served.target), Seen()
            await connection.call("GET", "/", (), seen)
            assert seen.body == b"all of it"
            connection.close()

    run(main())


def test_a_preliminary_answer_is_passed_over() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 100 Continue\r\n\r\n", whole(404, b"no"))

    async def main() -> None:
        async with serving(script) as served:
            connection, seen = HttpConnection(served.target), Seen()
            await connection.call("POST", "/", (b"{}",), seen)
            assert (seen.status, seen.body) == (404, b"no")
            connection.close()

    run(main())


@pytest.mark.parametrize(
    ("pieces", "kind"),
    [
        ((), "disconnected"),
        ((b"HTTP/1.1 200 OK\r\ncontent-le",), "disconnected"),
        ((STREAM_HEAD, chunk(b"data: ")), "truncated"),
        ((STREAM_HEAD, chunk(b"data: ")[:-4]), "truncated"),
        ((b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort",), "truncated"),
        ((b"SSH-2.0-OpenSSH_9\r\n",), "bad_response"),
        ((STREAM_HEAD, b"zz\r\n"), "bad_response"),
        ((b"HTTP/1.1 200 OK\r\nx: " + b"x" * (MAX_HEAD_BYTES + 9),), "bad_response"),
    ],
)
def test_failures(pieces: tuple[bytes, ...], kind: str) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.send(*pieces)
        exchange.hang_up()

    assert failing(script).kind == kind


def test_what_the_sink_raises_comes_through() -> None:
    class Picky(Seen):
        def on_body(self, data: bytes, now: float) -> None:
            raise ZeroDivisionError

    async def script(exchange: Exchange) -> None:
        await exchange.send(whole(200, b"ok"))

    async def main() -> None:
        async with serving(script) as served:
            connection = HttpConnection(served.target)
            with pytest.raises(ZeroDivisionError):
                await connection.call("GET", "/", (), Picky())
            await connection.call("GET", "/", (), Seen())
            assert served.connections == 2
            connection.close()

    run(main())


def test_nobody_there(unused_port: int) -> None:
    async def main() -> None:
        connection = HttpConnection(Target.parse(f"http://127.0.0.1:{unused_port}"))
        with pytest.raises(CallFailed) as failed:
            await connection.call("GET", "/", (), Seen())
        assert failed.value.kind == "connection_refused"
        elsewhere = HttpConnection(Target.parse("http://no-such-host.invalid"))
        with pytest.raises(CallFailed) as failed:
            await elsewhere.call("GET", "/", (), Seen())
        assert failed.value.kind == "connection_failed"

    run(main())


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", ("127.0.0.1", 8000, "", False)),
        ("localhost:8000/", ("localhost", 8000, "", False)),
        ("http://host/v1", ("host", 80, "", False)),
        ("http://host/api/v1/", ("host", 80, "/api", False)),
        ("https://host/api", ("host", 443, "/api", True)),
        ("http://[::1]:9", ("::1", 9, "", False)),
    ],
)
def test_urls(url: str, expected: tuple[str, int, str, bool]) -> None:
    target = Target.parse(url)
    assert (target.host, target.port, target.prefix, target.tls) == expected


@pytest.mark.parametrize(
    "url", ["", "http://", "ftp://host", "http://host:x", "http://host:99999", "http://a b", "http://me:pw@host",
            "http://host/?q", "http://host/é", "http://[::1"]
)  # fmt: skip
def test_bad_urls(url: str) -> None:
    with pytest.raises(ValueError, match="URL"):
        Target.parse(url)


def test_the_key_is_sent_and_checked() -> None:
    head = Target.parse("http://[::1]:9/x", "secret").head("GET", "/v1/models", 0)
    assert head.startswith(b"GET /x/v1/models HTTP/1.1\r\nHost: [::1]:9\r\n")
    assert b"\r\nAuthorization: Bearer secret\r\n" in head
    with pytest.raises(ValueError, match="API key"):
        Target.parse("http://host", "a\r\nX-Injected: 1")
