"""Bodies that are too large, announced and not; without a server and through one."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from server import body_limit
from server.body_limit import BodyLimit
from server.config import ServerConfig
from server.image_file import MAX_IMAGE_BYTES
from server.request_context import RequestContext, current_request, release_body
from tests.server.bench.virtual_loop import VirtualLoop
from tests.server.fakes import FakeEngine, application, say, services
from tests.server.harness import ServerProcess

MODEL_LIMIT = ServerConfig().body_limit_for(512, 64)


class Exchange:
    """One request to a BodyLimit of 10 bytes around an application that reads everything."""

    def __init__(self, chunks: list[bytes], length: str | None = None, *, swallow: bool = False) -> None:
        self.reads = 0
        self.sent: list[Message] = []
        self._chunks = chunks
        self._swallow = swallow
        headers = [] if length is None else [(b"content-length", length.encode())]
        scope: Scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
        asyncio.run(BodyLimit(self._app, lambda: 10)(scope, self._receive, self._send))

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            while (await receive()).get("more_body"):
                pass
        except Exception:
            if not self._swallow:
                raise
        await send({"type": "http.response.start", "status": 400 if self._swallow else 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x"})

    async def _receive(self) -> Message:
        self.reads += 1
        body = self._chunks.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(self._chunks)}

    async def _send(self, message: Message) -> None:
        self.sent.append(message)


def test_a_body_at_the_limit_passes() -> None:
    assert Exchange([b"12345", b"67890"], "10").status == 200
    assert Exchange([b"12345", b"67890"]).status == 200


def test_an_announced_size_is_refused_unread() -> None:
    for length in ("11", "99999999999999999999999", "-1", "x", ""):
        exchange = Exchange([b"12345"], length)
        assert exchange.status == 413
        assert exchange.reads == 0


def test_an_unannounced_one_as_soon_as_it_is_too_large() -> None:
    exchange = Exchange([b"12345"] * 100)
    assert exchange.status == 413
    assert exchange.reads == 3


def test_the_application_cannot_turn_it_into_something_else() -> None:
    exchange = Exchange([b"12345"] * 3, swallow=True)
    assert exchange.status == 413
    assert len(exchange.sent) == 2


class Clock:
    """Of the limit and of the loop in which it runs: sleeping takes no time, and no machine is too slow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._loop = VirtualLoop()
        monkeypatch.setattr(body_limit, "time", SimpleNamespace(monotonic=self._loop.time))

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(work)

    @property
    def now(self) -> float:
        return self._loop.time()


class Upload:
    """A request whose body arrives when the test says so, to a limit that it shares with others."""

    def __init__(self, middleware: BodyLimit) -> None:
        self._chunks: asyncio.Queue[Message] = asyncio.Queue()
        self._sent: list[Message] = []
        scope: Scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
        self.task = asyncio.create_task(middleware(scope, self._chunks.get, self._send))

    async def _send(self, message: Message) -> None:
        self._sent.append(message)

    async def put(self, size: int, *, more: bool = True) -> None:
        """Returns when it has been taken, and the next is asked for or nothing more is done."""
        self._chunks.put_nowait({"type": "http.request", "body": bytes(size), "more_body": more})
        while not self._chunks.empty() and not self.task.done():  # noqa: ASYNC110 - a turn of the loop, no time
            await asyncio.sleep(0)
        for _ in range(10):  # whoever has taken it does what is to be done at once
            await asyncio.sleep(0)

    async def status(self) -> int:
        await self.task
        return int(self._sent[0]["status"])


async def read_all(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive())["more_body"]:
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def test_all_bodies_together_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_limit, "_SHARED_BYTES", 25)

    async def scenario() -> None:
        middleware = BodyLimit(read_all, lambda: 10)
        first, second, third = Upload(middleware), Upload(middleware), Upload(middleware)
        await first.put(10)
        await second.put(10)
        await third.put(6)
        assert await third.status() == 503  # 26 bytes would be held.
        await first.put(0, more=False)
        assert await first.status() == 200
        fourth = Upload(middleware)
        await fourth.put(10)  # There is room again: for what was refused, too.
        await second.put(0, more=False)
        await fourth.put(0, more=False)
        assert [await second.status(), await fourth.status()] == [200, 200]
        assert middleware._held == 0

    asyncio.run(scenario())


def test_a_route_may_let_go_of_its_body_earlier() -> None:
    async def scenario() -> None:
        held: list[int] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await receive()
            held.append(middleware._held)
            release_body()
            held.append(middleware._held)
            await send({"type": "http.response.start", "status": 200, "headers": []})

        current_request.set(RequestContext("id"))
        middleware = BodyLimit(app, lambda: 10)
        await Upload(middleware).put(7, more=False)
        assert [*held, middleware._held] == [7, 0, 0]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
def test_generating_routes_do_once_the_engine_has_the_prompt(path: str, prompt: dict[str, object]) -> None:
    """A hundred whole answers to large embeddings may be awaited at once."""

    async def scenario() -> None:
        engine = FakeEngine(say("hi"), hang=True)
        middleware = BodyLimit(application(services(engine)), lambda: 1000)
        current_request.set(RequestContext("id"))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(middleware), base_url="http://test") as client:
            asking = asyncio.create_task(client.post(path, json=prompt))
            async with asyncio.timeout(20):
                while not engine.submitted or middleware._held:  # noqa: ASYNC110 - nothing to wait for sets an event
                    await asyncio.sleep(0.01)
            assert not asking.done()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(scenario())


def test_bodies_are_held_until_the_answer_begins() -> None:
    async def scenario() -> None:
        began, go_on = asyncio.Event(), asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await receive()
            await go_on.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            began.set()
            await asyncio.sleep(10)

        middleware = BodyLimit(app, lambda: 10)
        upload = Upload(middleware)
        await upload.put(7, more=False)
        assert middleware._held == 7
        go_on.set()
        await began.wait()
        assert middleware._held == 0
        upload.task.cancel()
        await asyncio.gather(upload.task, return_exceptions=True)
        assert middleware._held == 0

    asyncio.run(scenario())


def test_a_body_that_stops_arriving_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_limit, "_IDLE_SECONDS", 0.05)

    async def scenario() -> None:
        middleware = BodyLimit(read_all, lambda: 10)
        upload = Upload(middleware)
        await upload.put(3)
        assert await upload.status() == 408
        assert middleware._held == 0

    asyncio.run(scenario())


def test_a_body_that_trickles_is_given_up_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It never stops for long."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr(body_limit, "_SLOWEST", 1 << 30)

    async def scenario() -> None:
        middleware = BodyLimit(read_all, lambda: 1000)
        upload = Upload(middleware)
        waiting = asyncio.create_task(upload.status())
        while not waiting.done() and clock.now < 90:
            await upload.put(1)
            await asyncio.sleep(5)
        assert waiting.done() and await waiting == 408
        assert middleware._held == 0

    clock.run(scenario())


def test_a_slow_body_that_goes_on_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    async def scenario() -> None:
        upload = Upload(BodyLimit(read_all, lambda: 1 << 30))
        for at in range(13):
            await upload.put(50 * body_limit._SLOWEST, more=at < 12)
            await asyncio.sleep(50)
        assert await upload.status() == 200

    clock.run(scenario())


def test_waiting_for_a_disconnect_has_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_limit, "_IDLE_SECONDS", 0.05)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(receive(), 0.2)
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def scenario() -> None:
        upload = Upload(BodyLimit(app, lambda: 10))
        await upload.put(3, more=False)
        assert await upload.status() == 200

    asyncio.run(scenario())


def test_the_limit_follows_from_the_model() -> None:
    embedding_in_base64 = 2048 * 4096 * 4 * 4 // 3
    assert embedding_in_base64 < ServerConfig().body_limit_for(2048, 4096) < embedding_in_base64 * 1.1
    assert ServerConfig(max_body_bytes=5).body_limit_for(2048, 4096) == 5
    assert ServerConfig(max_json_bytes=5).json_limit_for(2048) == 5
    assert ServerConfig().json_limit_for(131072) == 10 << 20
    two_images = 2 * MAX_IMAGE_BYTES * 4 // 3
    assert two_images < ServerConfig().body_limit_for(512, 64, sees=True) < two_images * 1.2
    assert ServerConfig().body_limit_for(8192, 4096, sees=True) == ServerConfig().body_limit_for(8192, 4096)


# --- through a server -------------------------------------------------------------------------------------------------


def head(server: ServerProcess, *headers: str) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def first_line(connection: socket.socket) -> bytes:
    with connection.makefile("rb") as stream:
        return stream.readline()


def test_refused_before_it_is_sent(server: ServerProcess) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
        connection.sendall(head(server, f"Content-Length: {MODEL_LIMIT + 1}"))
        assert b" 413 " in first_line(connection)


def test_no_continue_for_a_body_that_is_refused(server: ServerProcess) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
        connection.sendall(head(server, f"Content-Length: {MODEL_LIMIT + 1}", "Expect: 100-continue"))
        assert b" 413 " in first_line(connection)


def test_a_chunked_body_is_cut_off(server: ServerProcess) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
        connection.sendall(head(server, "Transfer-Encoding: chunked"))
        chunk = b"10000\r\n" + bytes(0x10000) + b"\r\n"
        for _ in range(MODEL_LIMIT // 0x10000 + 2):
            connection.sendall(chunk)
        assert b" 413 " in first_line(connection)


def test_who_sends_the_whole_body_still_sees_the_answer(server: ServerProcess) -> None:
    """Closing the connection under a client that is sending would reset it before it reads the answer."""

    def chunks() -> Iterator[bytes]:
        for _ in range(200):
            yield bytes(1 << 18)

    with server.client() as client:
        for content in (chunks(), bytes(50 << 20)):
            answer = client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "body_too_large"
        assert client.get("/readyz").status_code == 200


def test_dropping_has_an_end(server: ServerProcess) -> None:
    sent = 0
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
        connection.sendall(head(server, "Content-Length: 900000000000"))
        try:
            while sent < 2 << 30:
                connection.sendall(bytes(1 << 20))
                sent += 1 << 20
        except OSError:
            pass
    assert sent < 1 << 30
    assert server.status("/readyz") == 200
