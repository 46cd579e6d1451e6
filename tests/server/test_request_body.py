"""Multipart bodies through the routes: the same requests as in JSON, and every way to get them wrong."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy

from runner.messages import Span
from server import request_body
from server.arriving_file import ArrivingFile
from server.arriving_json import ArrivingJson
from server.attachments import attach
from tests.models import HIDDEN_SIZE
from tests.server.completion_calls import embedding
from tests.server.conftest import StartServer
from tests.server.embedding_files import cut
from tests.server.fakes import Api, FakeEngine, StoreHarness, ids_of, say, services
from tests.server.harness import ServerProcess, eventually

BOUNDARY = "frontier"
CONTENT_TYPE = f"multipart/form-data; boundary={BOUNDARY}"
JSON = {"Content-Type": "application/json"}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def payload(count: int, value: float = 0.5) -> bytes:
    return safetensors.numpy.save({"rows": np.full((count, HIDDEN_SIZE), value, np.float32)})


def field(name: Any) -> dict[str, Any]:
    return {"type": "prompt_embeds", "part": name}


def send(path: str, body: Any, **fields: bytes) -> tuple[httpx.Response, FakeEngine]:
    engine = FakeEngine(say("x"))
    files = {"request": body if isinstance(body, bytes) else json.dumps(body).encode(), **fields}
    return Api(services(engine)).post(path, content=None, files=files), engine


def message(*content: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def test_the_json_of_a_form_has_a_limit() -> None:
    engine = FakeEngine(say("x"))
    body = json.dumps({"prompt": [field("a")], "user": "x" * 300_000}).encode()
    for limit, status in ((300_000, 413), (400_000, 200)):
        client = Api(services(engine, max_json_bytes=limit))
        assert client.post(COMPLETIONS, content=None, files={"request": body, "a": payload(2)}).status_code == status


def test_a_large_json_is_not_searched_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token ids among parts are refused, but not before all of them have been passed by."""
    on_loop: list[bool] = []

    def search(body: Mapping[str, Any], fields: Mapping[str, ArrivingFile]) -> None:
        on_loop.append(asyncio._get_running_loop() is not None)
        attach(body, fields)

    monkeypatch.setattr(request_body, "attach", search)
    for ids in (1000, 100_000):
        response, _ = send(COMPLETIONS, {"prompt": [field("a"), *[0] * ids]}, a=payload(2))
        assert response.status_code == 400, response.text
    assert on_loop == [True, False]


def test_a_form_is_what_its_json_would_be() -> None:
    text = {"type": "text", "text": "ques"}
    inline = [{"type": "prompt_embeds", "data": embedding(count, value)[0]} for count, value in ((3, 0.25), (2, 2.0))]
    engine = FakeEngine(say("x"))
    prompt = [inline[0], text, inline[1]]
    expected = Api(services(engine)).post(COMPLETIONS, {"prompt": prompt}).json()
    prompt = [field("b"), text, field("a")]
    response, other = send(COMPLETIONS, {"prompt": prompt}, a=payload(2, 2.0), b=payload(3, 0.25))
    assert response.status_code == 200, response.text
    assert response.json()["usage"] == expected["usage"]
    first, second = engine.submitted[0].prompt, other.submitted[0].prompt
    assert second.spans == first.spans == (Span(0, 3), Span(3 + len(ids_of("ques")), 2))
    assert second.row_digests == first.row_digests
    assert [bytes(rows) for rows in second.rows] == [bytes(rows) for rows in first.rows]


def test_rows_are_not_copied() -> None:
    """They are a view of the field's own buffer, up to the engine."""
    _, engine = send(COMPLETIONS, {"prompt": [field("a")]}, a=payload(3))
    (rows,) = engine.submitted[0].prompt.rows
    assert isinstance(rows, memoryview)
    assert isinstance(rows.obj, bytearray)


def test_every_place_that_has_parts() -> None:
    batch = [[field("a"), {"type": "token_ids", "token_ids": [5]}], [6, 7], [field("b")]]
    response, engine = send(COMPLETIONS, {"prompt": batch}, a=payload(2), b=payload(1))
    assert response.status_code == 200, response.text
    assert [len(each.prompt) for each in engine.submitted] == [3, 2, 1]
    messages = [
        {"role": "system", "content": "a"},
        message(field("a")),
        message({"type": "text", "text": "b"}, field("b")),
    ]
    for path in (CHAT, f"{CHAT}/render"):
        response, engine = send(path, {"messages": messages}, a=payload(2), b=payload(1))
        assert response.status_code == 200, response.text
    response, _ = send(f"{COMPLETIONS}/render", {"prompt": [field("a")]}, a=payload(2))
    assert response.json()[0]["count"] == 2
    response, _ = send(COMPLETIONS, {"prompt": [5]})  # without any field, as some clients might
    assert response.status_code == 200, response.text


def test_streams() -> None:
    response, _ = send(COMPLETIONS, {"prompt": [field("a")], "stream": True}, a=payload(2))
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("data: [DONE]\n\n")


ONE = {"a": payload(2)}
REFUSED: dict[str, tuple[str, Any, dict[str, bytes], str | None, str]] = {
    "not JSON": (COMPLETIONS, b"{secret", {}, None, "invalid_json"),
    "not an object": (COMPLETIONS, [5], {}, None, "invalid_json"),
    "deep": (COMPLETIONS, b'{"prompt":' * 100_000, {}, None, "invalid_json"),
    "a field that is missing": (COMPLETIONS, {"prompt": [field("b")]}, ONE, "prompt[0].part", "invalid_value"),
    "the JSON itself": (COMPLETIONS, {"prompt": [field("request")]}, {}, "prompt[0].part", "invalid_value"),
    "a field that nobody names": (COMPLETIONS, {"prompt": [5]}, ONE, "request", "invalid_value"),
    "a field named elsewhere": (COMPLETIONS, {"prompt": [5], "x": [field("a")]}, ONE, "request", "invalid_value"),
    "named by a text part": (
        COMPLETIONS, {"prompt": [{"type": "text", "text": "b", "part": "a"}]}, ONE, "request", "invalid_value",
    ),
    "named twice": (COMPLETIONS, {"prompt": [field("a"), field("a")]}, ONE, "prompt[1].part", "invalid_value"),
    "named twice in a batch": (
        COMPLETIONS, {"prompt": [[field("a")], [field("a")]]}, ONE, "prompt[1][0].part", "invalid_value",
    ),
    "named by a number": (COMPLETIONS, {"prompt": [field(5)]}, ONE, "prompt[0].part", "invalid_value"),
    "named by a list": (COMPLETIONS, {"prompt": [field(["a"])]}, ONE, "prompt[0].part", "invalid_value"),
    "beside data": (COMPLETIONS, {"prompt": [field("a") | {"data": "AAAA"}]}, ONE, "prompt[0].part", "invalid_value"),
    "beside an id": (COMPLETIONS, {"prompt": [field("a") | {"id": "emb_1"}]}, ONE, "prompt[0]", "invalid_value"),
    "no tensor": (COMPLETIONS, {"prompt": [field("a")]}, {"a": b"x" * 99}, "prompt[0].part", "invalid_value"),
    "an empty file": (COMPLETIONS, {"prompt": [field("a")]}, {"a": b""}, "prompt[0].part", "invalid_value"),
    "NaN": (COMPLETIONS, {"prompt": [field("a")]}, {"a": payload(1, float("nan"))}, "prompt[0].part", "invalid_value"),
    "too long": (
        COMPLETIONS, {"prompt": [field("a")]}, {"a": payload(129)}, "prompt[0].part", "context_length_exceeded",
    ),
    "in a message": (
        CHAT, {"messages": [message(field("a"))]}, {"a": b""}, "messages[0].content[0].part", "invalid_value",
    ),
    "missing in a message": (
        CHAT, {"messages": [message(field("b"))]}, {}, "messages[0].content[0].part", "invalid_value",
    ),
    "messages that are none": (CHAT, {"messages": [5, {"content": 5}, message()]}, ONE, "request", "invalid_value"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_refused(case: tuple[str, Any, dict[str, bytes], str | None, str]) -> None:
    path, body, fields, param, code = case
    response, engine = send(path, body, **fields)
    assert response.status_code == 400, response.text
    found = response.json()["error"]
    assert (found["param"], found["code"]) == (param, code)
    assert "secret" not in response.text
    assert engine.submitted == []


def test_without_its_json() -> None:
    response = Api(services(FakeEngine(say("")))).post(COMPLETIONS, content=None, files={"a": payload(1)})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "request")


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/responses", "/abort"])
def test_other_routes_take_none(path: str) -> None:
    assert send(path, {"prompt": "a"})[0].status_code == 415


def test_other_types_are_refused() -> None:
    api = Api(services(FakeEngine(say(""))))
    for kind in ("application/x-www-form-urlencoded", "multipart/mixed; boundary=b", "text/plain", ""):
        response = api.post(COMPLETIONS, content=b'{"prompt": "a"}', headers={"Content-Type": kind})
        assert response.status_code == 415, kind


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize"])
def test_compressed_bodies_are_refused(path: str) -> None:
    api = Api(services(FakeEngine(say(""))))
    for coding in ("gzip", "br", "identity"):
        response = api.post(path, content=gzip.compress(b"{}"), headers={"Content-Encoding": coding, **JSON})
        assert ("Content-Encoding" in response.text) == (coding != "identity")
        assert response.status_code == (400 if coding == "identity" else 415)


def form(body: dict[str, Any], data: bytes) -> bytes:
    fields = {"request": json.dumps(body).encode(), "a": data}
    parts = [
        b'--%b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (BOUNDARY.encode(), name.encode(), value)
        for name, value in fields.items()
    ]
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


def head(path: str, length: int) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "Host: a", f"Content-Type: {CONTENT_TYPE}", f"Content-Length: {length}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


# --- through a server -------------------------------------------------------------------------------------------------


@pytest.fixture
def server(start_server: StartServer) -> ServerProcess:
    return start_server().wait_ready()


def test_cut_uploads_leave_nothing(server: ServerProcess) -> None:
    whole = form({"prompt": [field("a")], "max_tokens": 1}, payload(200))
    upload = form({}, payload(200))
    for path, sent in (("/v1/completions", whole), ("/v1/prompt_embeds", upload)):
        for end in (len(sent) // 2, len(sent) - 1):
            with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
                connection.sendall(head(path, len(sent)) + sent[:end])
            # The same, said to be all of it.
            with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
                connection.sendall(head(path, end - 4) + sent[: end - 4])
                assert b" 400 " in connection.recv(1000)
    with server.client() as client:
        eventually(lambda: client.get("/load").json()["server_load"] <= 1)
        assert client.get("/v1/prompt_embeds").json()["data"] == []
        answer = client.post("/v1/completions", content=whole, headers={"Content-Type": CONTENT_TYPE})
        assert answer.status_code == 200, answer.text
        assert (
            client.post("/v1/prompt_embeds", content=upload, headers={"Content-Type": CONTENT_TYPE}).json()["rows"]
            == 200
        )
    assert len(server.messages("generate")) == 1


def test_larger_than_the_limit(start_server: StartServer) -> None:
    server = start_server(max_body_bytes=10_000).wait_ready()
    raw = {"Content-Type": "application/octet-stream"}
    with server.client() as client:
        for path in ("/v1/completions", "/v1/prompt_embeds"):
            sent = form({"prompt": [field("a")]}, payload(60))
            assert client.post(path, content=sent, headers={"Content-Type": CONTENT_TYPE}).status_code == 413
        chunks = (payload(60)[at : at + 1000] for at in range(0, 16_000, 1000))
        assert client.post("/v1/prompt_embeds", content=chunks, headers=raw).status_code == 413
        assert client.get("/v1/prompt_embeds").json()["data"] == []


@pytest.mark.parametrize("form", ["json", "multipart", "upload"])
def test_a_body_that_there_is_no_memory_for(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """503, and the next one is served."""
    rows = payload(10_000)
    text = json.dumps({"prompt": "x", "user": "x" * 400_000}).encode()
    calls: dict[str, tuple[str, dict[str, Any]]] = {
        "json": (COMPLETIONS, {"content": text, "headers": JSON}),
        "multipart": (COMPLETIONS, {"content": None, "files": {"request": b'{"prompt": "x"}', "a": b"x" * 400_000}}),
        "upload": ("/v1/prompt_embeds", {"content": rows, "headers": {"Content-Type": "application/octet-stream"}}),
    }
    path, options = calls[form]
    client = Api(services(FakeEngine(say("x")), stored=StoreHarness().stored))
    with monkeypatch.context() as patch:
        patch.setattr("server.pages._AHEAD_BYTES", 1 << 46)  # more than a process can have
        response = client.post(path, **options)
    assert response.status_code == 503, response.text
    assert response.json()["error"]["code"] == "overloaded"
    assert client.post(COMPLETIONS, {"prompt": "x"}).status_code == 200


def test_a_server_that_takes_no_embeddings_decodes_none() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for piece in (b'{"prompt_embeds": "', b"A" * 100_000, b'not base64", "max_tokens": 1}'):
            yield piece

    for takes, message in ((True, "not valid base64"), (False, "takes no prompt_embeds")):
        client = Api(services(FakeEngine(say("x")), enable_prompt_embeds=takes))
        response = client.post(COMPLETIONS, content=pieces(), headers=JSON)
        assert (response.status_code, message in response.text) == (400, True), response.text


@pytest.mark.parametrize("kind", ["json", "multipart", "upload"])
def test_a_body_of_any_form_waits_for_the_threads(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two of its chunks; how long is said by `ArrivingFile.keep_up`."""
    come, asked = 0, []

    async def keep_up(self: ArrivingFile) -> None:
        asked.append(come)

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal come
        for piece in cut(body, 50_000):
            come += len(piece)
            yield piece

    rows = payload(10_000)
    inline = {"prompt_embeds": base64.b64encode(rows).decode(), "max_tokens": 1}
    path, content_type, body = {
        "json": (COMPLETIONS, "application/json", json.dumps(inline).encode()),
        "multipart": (COMPLETIONS, CONTENT_TYPE, form({"prompt": [field("a")]}, rows)),
        "upload": ("/v1/prompt_embeds", "application/octet-stream", rows),
    }[kind]
    monkeypatch.setattr(ArrivingFile, "keep_up", keep_up)
    client = Api(services(FakeEngine(say("x")), stored=StoreHarness().stored))
    client.post(path, content=pieces(), headers={"Content-Type": content_type})
    assert come == len(body)
    assert set(range(200_000, come, 50_000)) <= set(asked)


def test_nothing_is_held_of_a_refused_body_while_its_rest_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    come, closed = 0, []
    plain = ArrivingJson.close

    def close(self: ArrivingJson) -> None:
        closed.append(come)
        plain(self)

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal come
        for piece in (b'{"prompt_embeds": "', b"A" * 100_000, b"not base64", b"A" * 1000, b'"}'):
            come += 1
            yield piece

    monkeypatch.setattr(ArrivingJson, "close", close)
    client = Api(services(FakeEngine(say("x"))))
    assert client.post(COMPLETIONS, content=pieces(), headers=JSON).status_code == 400
    assert (come, closed) == (5, [3])
