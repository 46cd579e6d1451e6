"""Hostile files in the requests that carry them: uploads, forms, base64 in JSON. And forms, references and lengths that
are themselves not what they say. A request is made from its number, so that a failure can be had again.
"""

from __future__ import annotations

import base64
import http.client
import json
import random
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.fuzz.files import LONG_FILE, Random, damaged, hostile

UPLOAD, COMPLETIONS, CHAT = "/v1/prompt_embeds", "/v1/completions", "/v1/chat/completions"
RAW = "application/octet-stream"
TIMEOUT = 30.0


@dataclass(frozen=True)
class Sent:
    path: str
    content_type: str
    body: bytes
    length: int | None = None
    """What the head says, if it is not the truth."""
    chunked: bool = False
    pieces: int = 1
    """So many are sent one after another, so that the server has read one before the next comes."""


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes


def request(number: int) -> Sent:
    """The same for the same number, always."""
    rng = random.Random(number)
    file = hostile(rng)
    kind = rng.random()
    if kind < 0.25:
        return _lied_about(Sent(UPLOAD, RAW, file), rng)
    if kind < 0.4:
        return _base64(file, rng)
    if kind < 0.47:
        return _long_base64(rng)
    return _lied_about(_form(file, rng), rng)


def _base64(file: bytes, rng: Random) -> Sent:
    text = base64.b64encode(file).decode()
    if rng.random() < 0.2:
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice(["=", "\n", "-", "é", "====", "\u0000", " "]) + text[at + rng.randrange(3) :]
    part: dict[str, Any] = {"type": "prompt_embeds", "data": text}
    bodies: list[tuple[str, dict[str, Any]]] = [
        (COMPLETIONS, {"prompt": [part]}),
        (COMPLETIONS, {"prompt_embeds": text}),
        (COMPLETIONS, {"prompt": [[part], [5]]}),
        (CHAT, {"messages": [{"role": "user", "content": [part]}]}),
    ]
    path, body = rng.choice(bodies)
    return Sent(path, "application/json", json.dumps(body | {"max_tokens": 1}).encode())


def _long_base64(rng: Random) -> Sent:
    """Long enough to be decoded before all of it has come; right in one case of three."""
    file = LONG_FILE if rng.random() < 0.7 else damaged(LONG_FILE, rng)
    text = base64.b64encode(file).decode()
    if rng.random() < 0.4:
        at = rng.choice((rng.randrange(len(text) + 1), len(text)))
        text = text[:at] + rng.choice(WRONG) + text[at + rng.randrange(5) :]
    if rng.random() < 0.2:
        text = text.replace("/", rng.choice(["\\/", "\\u002f"]))
    body = rng.choice(SHELLS).replace("%", text).encode()
    if rng.random() < 0.1:
        body = damaged(body, rng)
    path = CHAT if b'"messages"' in body[:100] else COMPLETIONS
    sent = _lied_about(Sent(path, "application/json", body), rng)
    return replace(sent, pieces=rng.randrange(1, 6))


WRONG = [
    "=",
    "==",
    "\n",
    "é",
    "\\",
    "\\/",
    "\\u002f",
    "\\u00",
    "\\u0000",
    '"',
    '\\"',
    '", "',
    '"}',
    '"data": "',
    "A" * 4000,
]
_PART = '{"type": "prompt_embeds", "data": "%"}'
SHELLS = [
    '{"max_tokens": 1, "prompt_embeds": "%"}',
    '{"prompt_embeds": ["%", "%"], "max_tokens": 1}',
    '{"prompt_embeds": "%", "max_tokens": 1, "prompt_embeds": "%"}',
    '{"max_tokens": 1, "prompt": [' + _PART + "]}",
    '{"max_tokens": 1, "prompt": [{"data": "%", "type": "prompt_embeds"}]}',
    '{"max_tokens": 1, "prompt": [{"type": "prompt_embeds", "data": "%", "type": "text", "text": "x"}]}',
    '{"max_tokens": 1, "prompt": [{"type": "prompt_embeds", "data": "%", "data": "AAAA"}]}',
    '{"max_tokens": 1, "prompt": [[' + _PART + '], [5]], "user": "x"}',
    '{"max_tokens": 1, "prompt": [' + _PART + '], "prompt": "x"}',
    '{"messages": [{"role": "user", "content": [' + _PART + ']}], "max_tokens": 1}',
    '{"messages": [{"role": "user", "content": "%"}], "max_tokens": 1, "prompt_embeds": "%"}',
    '{"max_tokens": 1, "prompt_embeds": "%',
    '{"max_tokens": 1, "prompt_embeds": "%": "%"}',
]
"""Where the texts of long files are put."""


def _form(file: bytes, rng: Random) -> Sent:
    """A form whose fields and references fit in one case of two."""
    boundary = rng.choice(["frontier", "-" * 30 + "1", "b" * 70])
    name = rng.choice(["a", "ü", "a b", "x" * 256])
    named: list[Any] = [name]
    fields: list[tuple[str, bytes]] = [(name, file)]
    if rng.random() < 0.4:
        named = rng.choice([[], ["b"], [name, name], [name, "request"], [5], [None], [[name]], [{}], [name] * 5000])
    if rng.random() < 0.3:
        more = [(name, b"again"), ("b", b""), ("request", b"{}"), ("", b""), *((f"f{n}", b"") for n in range(300))]
        fields += rng.sample(more, rng.choice((1, 1, 2, 300)))
    parts: list[dict[str, Any]] = [{"type": "prompt_embeds", "part": each} for each in named]
    if rng.random() < 0.1:
        parts.append({"type": "prompt_embeds", "id": rng.choice(["emb_1", "x" * 64, "x" * 9999, "", 5])})
    chat = {"messages": [{"role": "user", "content": parts}]}
    path, body = rng.choice([(COMPLETIONS, {"prompt": parts}), (CHAT, chat), (UPLOAD, {})])
    text = json.dumps(body | {"max_tokens": 1}).encode()
    if rng.random() < 0.1:
        text = damaged(text, rng)
    if path != UPLOAD or rng.random() < 0.5:
        fields.insert(rng.randrange(len(fields) + 1), ("request", text))
    form = _encoded(boundary, fields)
    if rng.random() < 0.3:
        form = damaged(form, rng)
    content_type = f"multipart/form-data; boundary={boundary}"
    if rng.random() < 0.05:
        content_type = rng.choice(
            ["multipart/form-data", "multipart/mixed; boundary=b", f"{content_type}x", "a" * 9999, RAW]
        )
    return Sent(path, content_type, form)


def _encoded(boundary: str, fields: Sequence[tuple[str, bytes]]) -> bytes:
    head = '--{}\r\nContent-Disposition: form-data; name="{}"\r\n\r\n'
    parts = [head.format(boundary, name).encode() + value + b"\r\n" for name, value in fields]
    return b"".join(parts) + f"--{boundary}--\r\n".encode()


def _lied_about(sent: Sent, rng: Random) -> Sent:
    """Now and then the head promises more than comes (the upload is cut), or less."""
    kind, size = rng.random(), len(sent.body)
    if kind < 0.03:
        return Sent(sent.path, sent.content_type, sent.body, length=size + rng.choice((1, 1000)))
    if kind < 0.05 and size:
        return Sent(sent.path, sent.content_type, sent.body, length=rng.randrange(size))
    return Sent(sent.path, sent.content_type, sent.body, chunked=kind > 0.9)


def send(port: int, sent: Sent) -> Answer | None:
    """The first answer to `sent`, or None if the connection ends without one."""
    with socket.create_connection(("127.0.0.1", port), TIMEOUT) as connection:
        try:
            data = _head(sent) + (_chunks(sent.body) if sent.chunked else sent.body)
            size = -(-len(data) // sent.pieces)
            for at in range(0, len(data), size):
                connection.sendall(data[at : at + size])
                if sent.pieces > 1:
                    time.sleep(0.002)
            if sent.length is not None and sent.length > len(sent.body):
                # Cut, not closed in peace: the server sees a reset.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return None
            response = http.client.HTTPResponse(connection)
            response.begin()
            return Answer(response.status, response.read())
        except (ConnectionError, http.client.BadStatusLine):
            return None


def _head(sent: Sent) -> bytes:
    size = len(sent.body) if sent.length is None else sent.length
    length = "Transfer-Encoding: chunked" if sent.chunked else f"Content-Length: {size}"
    lines = (f"POST {sent.path} HTTP/1.1", "Host: a", f"Content-Type: {sent.content_type}", length)
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _chunks(body: bytes) -> bytes:
    pieces = [body[at : at + 10_000] for at in range(0, len(body), 10_000)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
