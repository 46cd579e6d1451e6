"""Reads a JSON request body, for every POST route.

JSON here is strict JSON in UTF-8: NaN, Infinity, numbers beyond a double, lone surrogates and overlong integers are
refused, because everything behind this point (templates, the engine, the JSON of an error) would have to cope with
them otherwise. Duplicate keys are legal JSON; the last one wins.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request

from server.errors import APIError, BodyTooLarge, InvalidRequest, UnsupportedMediaType
from server.json_nodes import MAX_NODES, has_too_many_nodes
from server.long_strings import CutBody
from server.pages import Gathered
from server.services import services_of

_IN_PLACE_BYTES = 256 * 1024
"""Bodies up to this size take less time to parse than a thread takes to wake up."""


def media_type_of(request: Request) -> str:
    """Without its parameters, in lower case. Raises UnsupportedMediaType for a body that is compressed: it could be
    a thousand times as large as what the body limit counts."""
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise UnsupportedMediaType("Bodies must not be compressed: Content-Encoding is not supported.")
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_json(request: Request) -> dict[str, Any]:
    """The body as an object. Raises APIError: 415 for another content type, 400 for anything but a JSON object, and
    whatever the body limit raises while the body is read."""
    media_type = media_type_of(request)
    if media_type != "application/json":
        raise UnsupportedMediaType("The content type must be application/json.")
    body = Gathered()
    try:
        # Not `request.body()`: the request would keep it as long as the answer takes.
        async for chunk in request.stream():
            body.add(chunk)
    except ClientDisconnect:
        # Nobody reads this answer; the status is what the access log shows.
        raise APIError(499, "The client closed the connection before the body was complete.") from None
    return await parse_body(body.view, request)


async def parse_body(body: memoryview, request: Request) -> dict[str, Any]:
    """What has been read, in a thread if it is large. Raises BodyTooLarge, InvalidRequest."""
    if len(body) <= _IN_PLACE_BYTES:
        return parse_object(body)
    return await asyncio.to_thread(parse_large, body, services_of(request).max_json_bytes)


def parse_large(body: memoryview, limit: int | None = None) -> dict[str, Any]:
    """`parse_object`, with embeddings as `LongString`s. `limit`: bytes, of all but these; the interpreter's lock is
    held while they are parsed. Raises BodyTooLarge, InvalidRequest."""
    cut = CutBody(body)
    _check_size(cut.rest, limit)
    if has_too_many_nodes(cut.rest):
        raise InvalidRequest(f"The request body has more than {MAX_NODES} objects and lists.", code="invalid_json")
    value = parse_object(cut.rest)
    if cut.put_back(value):
        return value
    _check_size(body, limit)
    return parse_object(body)


def _check_size(body: bytes | memoryview, limit: int | None) -> None:
    if limit is not None and len(body) > limit:
        raise BodyTooLarge(
            f"The request's JSON is larger than {limit} bytes, the limit of this server. Embeddings and images are not"
            " counted where they stand in their places, of 64 KiB and more each, without escapes."
        )


def parse_object(body: bytes | memoryview) -> dict[str, Any]:
    """Raises InvalidRequest. No message quotes the body."""
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise InvalidRequest("The request body is nested too deeply.", code="invalid_json") from None
    except msgspec.ValidationError:  # well-formed, but a number that no double or integer type holds
        raise InvalidRequest("The request body contains a number that is out of range.", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequest("The request body must be a JSON object.", code="invalid_json")
    return value
