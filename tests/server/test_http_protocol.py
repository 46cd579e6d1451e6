"""Requests that are not quite HTTP, or too much of it, sent byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl

from server.http_protocol import MAX_HEAD_BYTES, CycleWriter, LimitedHttpProtocol, Writes
from server.http_server import HttpServer
from server.listener import bind
from tests.server.harness import ServerProcess, eventually


def exchange(server: ServerProcess, data: bytes) -> tuple[int, dict[str, object]]:
    """Status and JSON body of the first answer."""
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection, connection.makefile("rb") as stream:
        connection.sendall(data)
        status = int(stream.readline().split()[1])
        length, ids = 0, list[bytes]()
        while (line := stream.readline().strip()) != b"":
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
            ids += [value.strip()] * (name.lower() == b"x-request-id")
        assert len(ids) == 1 and ids[0].startswith(b"req-"), "an answer without an id of ours"
        return status, json.loads(stream.read(length) or b"{}")


def request(*headers: bytes, path: bytes = b"/livez") -> bytes:
    return b"\r\n".join([b"GET " + path + b" HTTP/1.1", b"Host: x", *headers, b"", b""])


def test_ordinary_headers_pass(server: ServerProcess) -> None:
    headers = [b"X-%d: %s" % (number, b"v" * 500) for number in range(90)]
    assert exchange(server, request(*headers))[0] == 200


@pytest.mark.parametrize(
    "data",
    [
        request(*[b"X-%d: v" % number for number in range(300)]),
        request(b"X-Large: " + b"v" * 200_000),
        request(path=b"/" + b"v" * 100_000),
        b"GET /livez HTTP/1.1\r\nX-Endless: " + b"v" * 400_000,
        b"GET /" + b"v" * 400_000,
    ],
    ids=["many headers", "a large header", "a long path", "a header without an end", "a path without an end"],
)
def test_a_head_that_is_too_large(server: ServerProcess, data: bytes) -> None:
    status, body = exchange(server, data)
    assert status == 431
    error = body["error"]
    assert isinstance(error, dict)
    assert error["code"] == "headers_too_large"
    assert server.status("/livez") == 200


@pytest.mark.parametrize(
    "data",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
        b"GET /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
    ],
    ids=["not HTTP", "TLS", "two lengths", "a path in no encoding", "a chunk without a size"],
)
def test_what_is_malformed(server: ServerProcess, data: bytes) -> None:
    status, body = exchange(server, data)
    assert status in (400, 415)
    assert isinstance(body["error"], dict)
    assert server.status("/livez") == 200


def test_a_refused_head_is_not_followed_by_another_request(server: ServerProcess) -> None:
    """What comes behind a refused head on the same connection must not be run."""
    refused = request(*[b"X-%d: v" % number for number in range(300)])
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
        connection.sendall(refused + request(path=b"/v1/models/hidden"))
        answers = b""
        while data := connection.recv(65536):
            answers += data
    assert answers.count(b"HTTP/1.1") == 1
    assert b" 431 " in answers
    with server.client() as client:
        client.get("/v1/nowhere")  # The log has come so far when it has this.
    eventually(lambda: "route=unknown" in server.stderr)
    assert "route=/v1/models/{model_id:path}" not in server.stderr


@pytest.mark.parametrize("keep", [b"", b"Connection: keep-alive\r\n"])
def test_http_1_0_knows_no_chunks(server: ServerProcess, keep: bytes) -> None:
    """RFC 9112, 6.1: no transfer coding where the request is HTTP/1.0. A stream ends with its connection."""
    body = json.dumps({"prompt": "hello", "max_tokens": 5, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.0\r\n%bContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection, connection.makefile("rb") as stream:
        connection.sendall(head % (keep, len(body)) + body)
        answer_head, _, events = stream.read().partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in answer_head and b"connection: close" in answer_head
    *lines, done, end = events.split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    chunks = [json.loads(line.removeprefix(b"data: ")) for line in lines]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    with server.client() as client:
        whole = client.post("/v1/completions", json={**json.loads(body), "stream": False})
    assert text == whole.json()["choices"][0]["text"] != ""


def test_heads_are_counted_one_by_one_on_a_connection(server: ServerProcess) -> None:
    with server.client() as client:
        for _ in range(40):
            assert client.get("/livez", headers={"x-filler": "v" * 30_000}).status_code == 200


def test_unknown_routes_and_methods_have_openais_body(server: ServerProcess) -> None:
    with server.client() as client:
        for method, path, allowed in (
            ("GET", "/v1/nowhere", None),
            ("GET", "/nowhere", None),
            ("POST", "/", None),
            ("GET", "/v1/completions", "POST"),
            ("DELETE", "/livez", "GET, HEAD"),
            ("POST", "/v1/models", "GET"),
            ("DELETE", "/v1/prompt_embeds", "GET, POST"),
            ("POST", "/v1/responses/resp_x", "DELETE, GET"),
            ("GET", "/livez/", None),
        ):
            answer = client.request(method, path)
            assert answer.status_code == (405 if allowed else 404), path
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["type"] == "invalid_request_error"
            assert answer.headers.get("allow") == allowed


def test_every_answer_has_an_id_of_ours(server: ServerProcess) -> None:
    with server.client() as client:
        answers = [client.get(path, headers={"x-request-id": "mine"}) for path in ("/livez", "/nowhere", "/v1/models")]
    ids = {answer.headers["x-request-id"] for answer in answers}
    assert len(ids) == 3
    assert "mine" not in ids
    assert "server" not in answers[0].headers


def test_requests_with_one_id_of_the_clients_are_two_requests(server: ServerProcess) -> None:
    fields = {"model": "scripted", "max_tokens": 60, "ignore_eos": True, "request_id": "mine", "return_token_ids": True}

    def complete(prompt: list[int]) -> dict[str, Any]:
        with server.client(headers={"x-request-id": "mine"}) as client:
            body: dict[str, Any] = client.post("/v1/completions", json={"prompt": prompt, **fields}).json()
            return body

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(complete, ([5], [6], [7], [8])))
    assert [answer["choices"][0]["token_ids"] for answer in answers] == [[each] * 60 for each in (5, 6, 7, 8)]
    assert len({answer["id"] for answer in answers}) == 4


def test_a_connection_that_was_closed_keeps_nothing_from_others() -> None:
    class Connection(asyncio.Transport):
        def __init__(self, *, closed: bool) -> None:
            self.closed, self.sent = closed, b""

        def is_closing(self) -> bool:
            return self.closed

        def write(self, data: Any) -> None:
            if self.closed:
                raise RuntimeError("the handler is closed")
            self.sent += data

    async def main() -> None:
        loop = asyncio.get_running_loop()
        writes, open_one, closed_one = Writes(loop), Connection(closed=False), Connection(closed=True)
        for transport in (closed_one, open_one):
            cycle = SimpleNamespace(
                transport=transport, flow=FlowControl(transport), disconnected=False, chunked_encoding=True
            )
            CycleWriter(SimpleNamespace(writes=writes), cycle).write(b"data: x\n\n")  # type: ignore[arg-type]
        assert open_one.sent == b"", "they are written together"
        await asyncio.sleep(0)
        assert open_one.sent == b"9\r\ndata: x\n\n\r\n"

    asyncio.run(main())


def test_idle_connections_outlive_those_of_proxies() -> None:
    """Proxies keep them for 60 s. Who closes first must be they: otherwise a request meets a closed connection."""
    assert HttpServer(_never, silent_seconds=60.0)._uvicorn.config.timeout_keep_alive > 60


async def _never(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that nobody asks."""


def test_one_line_is_logged_for_a_request_and_no_content(server: ServerProcess) -> None:
    with server.client() as client:
        hostile = {"x-request-id": "evil\tid"}
        body = {"model": "scripted", "prompt": "a secret prompt", "max_tokens": 3, "ignore_eos": True}
        own = client.post("/v1/completions?secret=1", json=body, headers={"x-request-id": "client-7"})
        other = client.post("/v1/secret", json=body, headers=hostile)

    def logged(answer: httpx.Response) -> list[str]:
        """Written once the answer has been sent."""
        name = f"id={answer.headers['x-request-id']}"
        return eventually(lambda: [line for line in server.stderr.splitlines() if name in line])

    assert own.status_code == 200
    (line,) = logged(own)
    for part in ("route=/v1/completions", "status=200", "completion_tokens=3", "finished=length", "client_id=client-7"):
        assert part in line
    (line,) = logged(other)
    assert "route=unknown" in line
    assert "secret" not in server.stderr
    assert "evil" not in server.stderr


def answer_to(data: bytes, *, more: bytes = b"") -> bytes:
    """All that a server sends before it closes a connection on which `data` arrives, then `more` again and again."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        """Reads the body, and answers with the number of headers that it sees then."""
        while (message := await receive()).get("more_body"):
            pass
        if message["type"] == "http.request":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
            await send({"type": "http.response.body", "body": b"%d headers" % len(scope["headers"])})

    async def drip(writer: asyncio.StreamWriter) -> None:
        while more:
            await asyncio.sleep(0.05)
            writer.write(more)

    async def scenario() -> bytes:
        with bind("127.0.0.1", 0) as listener:
            config = uvicorn.Config(
                app, http=LimitedHttpProtocol, lifespan="off", log_config=None, timeout_keep_alive=1
            )
            http = uvicorn.Server(config)
            serving = asyncio.create_task(http._serve([listener]))
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(data)
            dripping = asyncio.create_task(drip(writer))
            answer = b""
            with contextlib.suppress(ConnectionResetError):  # behind the answer, where more was sent than is read
                while part := await asyncio.wait_for(reader.read(1 << 16), 60):
                    answer += part
            dripping.cancel()
            writer.close()
            http.should_exit = True
            await serving
        return answer

    return asyncio.run(scenario())


def test_a_connection_that_never_sends_a_request_is_closed() -> None:
    """uvicorn starts its keep-alive timer after the first answer only."""
    assert answer_to(b"") == b""


@pytest.mark.parametrize(
    ("data", "more"), [(b"GET /livez HTTP/1.1\r\n", b""), (b"GET /livez HTTP/1.1\r\n", b"X: 1\r\n"), (b"\r\n", b"\r\n")]
)
def test_a_head_that_never_ends_is_given_up(data: bytes, more: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn's keep-alive timer ends with the first byte."""
    monkeypatch.setattr(LimitedHttpProtocol, "head_seconds", 0.3)
    head, _, body = answer_to(data, more=more).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert json.loads(body)["error"]["code"] == "timeout"


CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"


def test_trailers_do_not_become_headers() -> None:
    answer = answer_to(CHUNKED + b"0\r\nAuthorization: Bearer key\r\nX-Two: 2\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"2 headers" in answer


@pytest.mark.parametrize(
    ("data", "more"),
    [
        (CHUNKED + b"0\r\n", b"X-Trailer: v\r\n" * 2_000),
        (CHUNKED + b"0\r\nX-Endless: ", b"v" * 30_000),
        (CHUNKED + b"5;extension=", b"v" * 30_000),
    ],
    ids=["many trailers", "an endless trailer", "an endless extension"],
)
def test_what_frames_a_body_has_a_limit(data: bytes, more: bytes) -> None:
    head, _, body = answer_to(data, more=more).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "invalid_http"


def test_chunks_of_one_byte_are_let_be() -> None:
    """Though there are more bytes around them than a head may have."""
    chunks = b"1\r\nx\r\n" * 20_000
    assert 5 * len(chunks) // 6 > MAX_HEAD_BYTES
    answer = answer_to(CHUNKED + chunks + b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")


UPGRADES = [
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n",
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n",
]


@pytest.mark.parametrize("upgrade", UPGRADES, ids=["h2c", "websocket"])
@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("piece", [1 << 16, 7])
def test_a_body_behind_an_upgrade_is_the_request_s(
    server: ServerProcess, upgrade: bytes, is_chunked: bool, piece: int
) -> None:
    """Java's HTTP client offers h2c with each first request. And a body that was taken for what comes after the request
    would be one of its own: here it looks like one."""
    hidden = b"GET /v1/models/hidden HTTP/1.1\r\nHost: x\r\n\r\n"
    framing = b"Transfer-Encoding: chunked" if is_chunked else b"Content-Length: %d" % len(hidden)
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(hidden), hidden) if is_chunked else hidden
    first = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" + upgrade + framing
    bodiless = b"GET /livez HTTP/1.1\r\nHost: x\r\n" + upgrade + b"\r\n"
    last = b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    data = first + b"\r\n\r\n" + body + bodiless + last
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection, connection.makefile("rb") as stream:
        for start in range(0, len(data), piece):
            connection.sendall(data[start : start + piece])
            if piece < 100:
                time.sleep(0.001)
        answers = stream.read()
    assert re.findall(rb"HTTP/1\.1 (\d+) ", answers) == [b"400", b"200", b"200"]
    assert b"not valid JSON" in answers


@pytest.mark.parametrize("upgrade", UPGRADES, ids=["h2c", "websocket"])
@pytest.mark.parametrize(("version", "more"), [(b"1.1", b""), (b"1.1", b"Connection: close\r\n"), (b"1.0", b"")])
def test_a_client_that_offers_another_protocol_is_answered(
    server: ServerProcess, upgrade: bytes, version: bytes, more: bytes
) -> None:
    body = json.dumps({"prompt": "hello", "max_tokens": 3}).encode()
    head = b"POST /v1/completions HTTP/%b\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
    status, answer = exchange(server, head % (version, len(body)) + more + upgrade + b"\r\n" + body)
    assert (status, answer["object"]) == (200, "text_completion")


def test_requests_may_wait_behind_others_but_not_without_end() -> None:
    """A read of 256 KiB holds thousands, and what waits would grow with every answer."""
    get = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    assert answer_to(get * 2).count(b"HTTP/1.1 200") == 1  # That answer closes the connection.
    answer = answer_to(get * 200)
    assert answer.count(b"HTTP/1.1") == 1
    assert answer.startswith(b"HTTP/1.1 400 ")


def test_nothing_is_written_into_another_answer(server: ServerProcess) -> None:
    """A bad request behind others that are still being answered: what is sent of these stays what it is."""
    body = json.dumps({"model": "scripted", "prompt": [5, 6], "max_tokens": 400, "ignore_eos": True, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    asked = len(server.messages("generate"))
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection, server.held() as step:
        connection.sendall(head.encode() + b"\r\n\r\n" + body.encode())
        eventually(lambda: len(server.messages("generate")) > asked)
        step()
        answer = b""
        while b"data: " not in answer:
            answer += connection.recv(1000)
        connection.sendall(request() + b"nonsense\r\n\r\n")
        while data := connection.recv(65536):
            answer += data
    assert answer.count(b"HTTP/1.1") == 1
    assert b"[DONE]" not in answer


class Cycle:
    """Of uvicorn's, what receives a body."""

    def __init__(self) -> None:
        self.body: bytes | bytearray = bytearray()


def test_large_pieces_of_a_body_are_not_copied() -> None:
    protocol = LimitedHttpProtocol.__new__(LimitedHttpProtocol)
    small, large = b"a" * 100, b"b" * 100_000
    for pieces in ([large], [small], [large, small], [small, large, large], [large, large, small], [small] * 5):
        cycle = Cycle()
        protocol.cycle = cycle  # type: ignore[assignment]
        for piece in pieces:
            protocol._spare_copies(len(piece))
            cycle.body += piece
        assert bytes(cycle.body) == b"".join(pieces)
        assert (bytes(cycle.body) is large) == (pieces == [large])
        assert isinstance(cycle.body, bytes) == (pieces == [large])  # else adding again and again would copy all of it
