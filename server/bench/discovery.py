"""What is asked of a server before it is measured: which model it has, and how its rows are made. Called by
`command`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from server.bench.completion_stream import http_failure
from server.bench.http_connection import CallFailed, HttpConnection, Target

_MAX_BYTES = 1 << 20
_SECONDS = 30
_MODELS = "/v1/models"
_ROWS = "/v1/token_embeddings"


@dataclass
class _Collected:
    path: str
    status: int = 0
    body: bytearray = field(default_factory=bytearray)

    def on_status(self, status: int, now: float) -> None:
        self.status = status

    def on_body(self, data: bytes, now: float) -> None:
        self.body += data
        if len(self.body) > _MAX_BYTES:
            raise CallFailed("bad_response", f"the answer to GET {self.path} is too long")


class _Card(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Card]


class Rows(msgspec.Struct, frozen=True):
    """Of a model: as many numbers in each as `hidden` says, and so many of them in its table."""

    hidden: int
    vocab_size: int


def find_model(target: Target) -> str:
    """The first model that the server lists. Raises CallFailed."""
    answer = asyncio.run(_get(target, _MODELS))
    if answer.status != 200:
        raise http_failure(answer.status, bytes(answer.body))
    try:
        models = msgspec.json.decode(answer.body, type=_Models).data
    except msgspec.MsgspecError:
        models = []
    if not models:
        raise CallFailed("bad_response", f"GET {_MODELS} names no model; use --model")
    return models[0].id


def find_rows(targets: Sequence[Target]) -> list[Rows]:
    """Of those servers that say it: a route of this project's own."""
    return [rows for target in targets if (rows := _find_rows(target)) is not None]


def _find_rows(target: Target) -> Rows | None:
    try:
        answer = asyncio.run(_get(target, _ROWS))
        rows = msgspec.json.decode(answer.body, type=Rows)
    except (CallFailed, msgspec.MsgspecError):
        return None
    return rows if answer.status == 200 and rows.hidden > 0 and rows.vocab_size > 3 else None


async def _get(target: Target, path: str) -> _Collected:
    connection, answer = HttpConnection(target, connect_timeout=10), _Collected(path)
    try:
        async with asyncio.timeout(_SECONDS):
            await connection.call("GET", path, (), answer)
    except TimeoutError:
        raise CallFailed("timeout", f"GET {path} was not answered within {_SECONDS} s") from None
    finally:
        connection.close()
    return answer
