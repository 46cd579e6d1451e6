"""Hostile bodies: each is refused with a 4xx that quotes nothing of it."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from server.body import parse_object, read_json
from server.errors import APIError, InvalidRequest

BAD = {
    "empty": b"",
    "not json": b"prompt=secret",
    "trailing": b'{"a": 1} secret',
    "array": b'["secret"]',
    "string": b'"secret"',
    "null": b"null",
    "NaN": b'{"n": NaN}',
    "Infinity": b'{"n": Infinity}',
    "minus Infinity": b'{"n": -Infinity}',
    "beyond a double": b'{"n": 1e999}',
    "5,000 digits": b'{"n": ' + b"9" * 5000 + b"}",
    "lone high surrogate": b'{"a": "secret \\ud800"}',
    "lone high surrogate inside": b'{"a": "\\ud800 secret secret"}',
    "lone low surrogate": b'{"a": "\\udc00 secret secret"}',
    "surrogate in a key": b'{"\\ud800 secret secret": 1}',
    "surrogate in UTF-8": b'{"a": "\xed\xa0\x80"}',
    "not UTF-8": b'{"a": "\xff secret"}',
    "overlong UTF-8": b'{"a": "\xc0\x80"}',
    "deep list": b'{"a": ' + b"[" * 200_000,
    "deep object": b'{"a":' * 200_000,
    "deep and closed": b"[" * 100_000 + b"]" * 100_000,
    "byte order mark": b"\xef\xbb\xbf{}",
    "control character": b'{"a": "\x00"}',
}


@pytest.mark.parametrize("body", BAD.values(), ids=BAD.keys())
def test_what_is_no_json_object(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_object(body)
    assert caught.value.status == 400
    assert caught.value.code == "invalid_json"
    assert "secret" not in caught.value.message
    assert len(caught.value.message) < 200


def test_what_is_one() -> None:
    assert parse_object(b'{"a": "\\ud83e\\udee0", "b": [1, 2.5, true, null]}') == {"a": "🫠", "b": [1, 2.5, True, None]}


def test_the_last_of_duplicate_keys_wins() -> None:
    assert parse_object(b'{"a": 1, "a": 2}') == {"a": 2}


def test_numbers_keep_their_kind() -> None:
    value = parse_object(b'{"a": 1, "b": 1.0}')
    assert (type(value["a"]), type(value["b"])) == (int, float)


def read(body: bytes, content_type: str | None, *, gone: bool = False) -> dict[str, Any]:
    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"} if gone else {"type": "http.request", "body": body, "more_body": False}

    headers = [] if content_type is None else [(b"content-type", content_type.encode())]
    app = SimpleNamespace(state=SimpleNamespace(services=SimpleNamespace(max_json_bytes=1 << 20)))
    scope = {"type": "http", "method": "POST", "headers": headers, "app": app}
    return asyncio.run(read_json(Request(scope, receive)))


@pytest.mark.parametrize(
    "content_type", [None, "", "text/plain", "application/x-www-form-urlencoded", "text/json", "application/json5"]
)
def test_other_content_types(content_type: str | None) -> None:
    with pytest.raises(APIError) as caught:
        read(b"{}", content_type)
    assert caught.value.status == 415


@pytest.mark.parametrize("content_type", ["application/json", "Application/JSON; charset=utf-8"])
def test_the_right_content_type(content_type: str) -> None:
    assert read(b'{"a": 1}', content_type) == {"a": 1}


def test_a_client_that_leaves_in_the_middle() -> None:
    with pytest.raises(APIError) as caught:
        read(b"", "application/json", gone=True)
    assert caught.value.status == 499


@pytest.mark.parametrize(("size", "in_thread"), [(1000, False), (300_000, True)])
def test_large_bodies_are_parsed_in_a_thread(size: int, in_thread: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def parse(body: bytes) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return parse_object(body)

    monkeypatch.setattr("server.body.parse_object", parse)
    assert len(read(b'{"a": "' + b"x" * size + b'"}', "application/json")["a"]) == size
    assert (threads[0] is not threading.main_thread()) == in_thread


ROWS = base64.b64encode(bytes(2 << 20)).decode()
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + ROWS}}


@pytest.mark.parametrize(
    "value",
    [
        {"prompt_embeds": ROWS},
        {"prompt_embeds": [ROWS, ROWS]},
        {"prompt": ["x", {"type": "prompt_embeds", "data": ROWS}]},
        {"messages": [{"role": "user", "content": [IMAGE]}], "user": "x" * 1_000_000},
    ],
)
def test_embeddings_and_images_are_not_counted_as_json(value: Any) -> None:
    parsed = read(json.dumps(value).encode(), "application/json")
    assert parsed.keys() == value.keys()


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": "x" * (1 << 20)},
        {"prompt": [5] * 400_000},
        {"prompt_embeds": "A", "user": "x" * (1 << 20)},
        {"metadata": {"data": ROWS}},
        {"prompt_embeds": ROWS, "metadata": {"data": ROWS}},
        {"prompt_embeds": ROWS + "\n"},
        {"prompt": [{}] * 300_000},
    ],
    ids=["a text", "token ids", "an unused field", "no embedding", "one of two", "escapes", "objects"],
)
def test_json_that_is_too_large_is_not_parsed(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold the interpreter's lock for as long as it takes."""
    sizes = []

    def parse(body: bytes) -> dict[str, Any]:
        sizes.append(len(body))
        return parse_object(body)

    monkeypatch.setattr("server.body.parse_object", parse)
    with pytest.raises(APIError) as caught:
        read(json.dumps(value).encode(), "application/json")
    assert (caught.value.status, caught.value.code) == (413, "body_too_large")
    assert "1048576 bytes" in caught.value.message
    assert max(sizes, default=0) <= 1 << 20
