"""What the log and the metrics say of answers that are cut, over a real uvicorn and real sockets, in either kind of
loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import pytest
import uvicorn
import uvloop
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from server.delivery import DELIVERY
from server.errors import RequestAborted
from server.http_protocol import LimitedHttpProtocol
from server.listener import bind
from server.metrics import Metrics
from server.request_log import RequestLog
from server.route_paths import RoutePaths

REQUEST = b"POST /v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
LARGE = bytes(8 << 20)
"""More than a loopback connection holds."""
LAST = bytes(200 << 10)
"""One piece; more than the small buffers of `SMALL` connections and a write buffer's mark hold."""
SMALL = 16 << 10

App = Callable[[Scope, Receive, Send], Coroutine[Any, Any, None]]
Client = Callable[[socket.socket], Coroutine[Any, Any, None]]
Outcome = tuple[dict[str, Any], Metrics]


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.fields: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.fields.append(record.__dict__["fields"])


@pytest.fixture
def lines() -> Iterator[Lines]:
    logger, handler = logging.getLogger("intarsia.request"), Lines()
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    yield handler
    logger.setLevel(level)
    logger.removeHandler(handler)


@pytest.fixture(params=[uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def outcome(
    request: pytest.FixtureRequest, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> Callable[[App, Client], Outcome]:
    """Serves one request of a client's; its line and what was counted."""

    def outcome(app: App, client: Client, *, read_seconds: float = 60.0, **options: Any) -> Outcome:
        monkeypatch.setattr(LimitedHttpProtocol, "read_seconds", read_seconds)
        metrics = Metrics("m")
        watched = RequestLog(app, metrics, RoutePaths([]))
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(asyncio.wait_for(served(watched, client, lines, **options), 20))
        (fields,) = lines.fields
        counted = {name: count for name, count in metrics.responses.values().items() if count}
        assert counted == {str(fields["status"]): 1}
        return fields, metrics

    return outcome


async def served(app: RequestLog, client: Client, lines: Lines, *, stop: bool = False, widen: bool = False) -> None:
    """`stop`: the server ends while the request is being answered. `widen`: all that it holds goes out in one write."""
    with bind("127.0.0.1", 0) as listener, socket.socket() as connection:
        for each, option in ((listener, socket.SO_SNDBUF), (connection, socket.SO_RCVBUF)):
            each.setsockopt(socket.SOL_SOCKET, option, SMALL)
        config = uvicorn.Config(
            app, http=LimitedHttpProtocol, lifespan="off", log_config=None, timeout_graceful_shutdown=0
        )
        http = uvicorn.Server(config)
        serving = asyncio.create_task(http._serve([listener]))
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, listener.getsockname())
        await loop.sock_sendall(connection, REQUEST)
        if widen:
            await asyncio.sleep(0.05)
            for protocol in http.server_state.connections:
                served = protocol.transport.get_extra_info("socket")
                served.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        await client(connection)
        http.should_exit = stop
        while not lines.fields:  # noqa: ASYNC110 - a log sets no event
            await asyncio.sleep(0.01)
        http.should_exit = True
        connection.close()
        await serving


async def read(connection: socket.socket, size: int) -> None:
    loop = asyncio.get_running_loop()
    while size > 0 and (data := await loop.sock_recv(connection, size)):
        size -= len(data)


async def read_a_little_and_leave(connection: socket.socket) -> None:
    await read(connection, 10_000)
    connection.close()


async def leave(connection: socket.socket) -> None:
    await asyncio.sleep(0.05)
    connection.close()


async def never_read(_: socket.socket) -> None: ...


def whole(body: bytes, **headers: str) -> App:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(body, headers=headers)(scope, receive, send)

    return app


async def stream(scope: Scope, receive: Receive, send: Send) -> None:
    """Ends when its client does, as streams do here; and its last words are written to nobody."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": bytes(20_000), "more_body": True})
    while (await receive())["type"] != "http.disconnect":
        pass
    await send({"type": "http.response.body", "body": b"[DONE]", "more_body": False})


async def slow(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    await RequestAborted().response()(scope, receive, send)


def shown(fields: dict[str, Any]) -> tuple[Any, ...]:
    return fields["status"], fields.get("sent_status"), fields.get("cut")


@pytest.mark.parametrize("app", [whole(LARGE), whole(LAST), stream], ids=["in pieces", "the last piece", "a stream"])
def test_who_leaves_in_the_middle(outcome: Callable[..., Outcome], app: App) -> None:
    fields, _ = outcome(app, read_a_little_and_leave)
    assert shown(fields) == (499, 200, "client_left")


def test_who_has_left_in_this_turn_of_the_loop(outcome: Callable[..., Outcome]) -> None:
    """The connection knows; the protocol will be told in the next."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        scope["extensions"][DELIVERY]._cycle.transport.abort()
        await send({"type": "http.response.body", "body": b"x", "more_body": False})

    fields, _ = outcome(app, never_read)
    assert shown(fields) == (499, 200, "client_left")


def test_who_leaves_before_the_answer(outcome: Callable[..., Outcome]) -> None:
    fields, metrics = outcome(slow, leave)
    assert shown(fields) == (499, None, "client_left")
    assert "error" not in fields and not any(metrics.errors.values().values()), "nobody was told"


@pytest.mark.parametrize("headers", [{}, {"Connection": "close"}], ids=["kept alive", "closed by us"])
@pytest.mark.parametrize("widen", [False, True], ids=["bit by bit", "at once"])
def test_who_reads_it_all(outcome: Callable[..., Outcome], headers: dict[str, str], widen: bool) -> None:
    """A connection that is closed behind an answer may be lost in the moment in which there is room again."""
    fields, _ = outcome(whole(LAST, **headers), partial(read, size=len(LAST)), widen=widen)
    assert shown(fields) == (200, None, None)


def test_a_status_499_that_is_sent_is_no_cut(outcome: Callable[..., Outcome]) -> None:
    async def aborted(scope: Scope, receive: Receive, send: Send) -> None:
        await RequestAborted().response()(scope, receive, send)

    fields, _ = outcome(aborted, partial(read, size=100))
    assert shown(fields) == (499, None, None)
    assert fields["error"] == "request_aborted"


@pytest.mark.parametrize("body", [LARGE, LAST], ids=["in pieces", "the last piece"])
def test_who_does_not_read(outcome: Callable[..., Outcome], body: bytes) -> None:
    fields, _ = outcome(whole(body), never_read, read_seconds=0.2)
    assert shown(fields) == (499, 200, "not_read")


def test_who_sends_rubbish_behind_a_request(outcome: Callable[..., Outcome]) -> None:
    async def rubbish(connection: socket.socket) -> None:
        await read(connection, 10_000)
        await asyncio.get_running_loop().sock_sendall(connection, b"rubbish\r\n\r\n")

    fields, _ = outcome(stream, rubbish)
    assert shown(fields) == (499, 200, "invalid_http")


def test_a_fault_of_ours_is_not_the_client_s(outcome: Callable[..., Outcome], caplog: pytest.LogCaptureFixture) -> None:
    async def faulty(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ZeroDivisionError

    fields, metrics = outcome(faulty, partial(read, size=10))
    assert shown(fields) == (500, 200, "fault")
    assert fields["error"] == "server_error" and metrics.errors.values()["server_error"] == 1
    assert "ZeroDivisionError" in caplog.text


def test_the_server_ends(outcome: Callable[..., Outcome]) -> None:
    fields, _ = outcome(stream, partial(read, size=10_000), stop=True)
    assert shown(fields) == (503, 200, "shutdown")


def test_another_server_that_raises(lines: Lines) -> None:
    """As the ASGI specification has it since 2.4."""

    async def gone(message: Message) -> None:
        if message["type"] == "http.response.body":
            raise OSError

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    scope: Scope = {"type": "http", "path": "/v1/x", "method": "POST", "headers": []}
    with contextlib.suppress(OSError):
        asyncio.run(RequestLog(whole(LAST), Metrics("m"), RoutePaths([]))(scope, receive, gone))
    assert shown(lines.fields[0]) == (499, 200, "client_left")
