"""Reads the body of a request whose prompt may have embeddings: JSON, or multipart/form-data whose field `request` is
the JSON and whose other fields are tensor files; and of an upload to the store. For the routes that take these.

Tensors never go through JSON; they are made into rows while they arrive (`arriving_file`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import ClientDisconnect, Request

from server.arriving_file import ArrivingFile
from server.arriving_json import ArrivingJson
from server.attachments import attach
from server.body import media_type_of, parse_body, read_json
from server.errors import APIError, InvalidRequest, UnsupportedMediaType
from server.multipart import MEDIA_TYPE, Fields, close_files, read_fields
from server.services import services_of

JSON_FIELD = "request"
_RAW_TYPE = "application/octet-stream"
_IN_PLACE_BYTES = 64 * 1024
"""Of JSON whose places for embeddings are looked at in less time than a thread takes to wake up: of eight megabytes of
token ids among parts it takes half a second."""


async def read_request(request: Request) -> dict[str, Any]:
    """The request's JSON object; where it came with tensors, they are in its parts. Raises APIError."""
    media_type = media_type_of(request)
    if media_type == MEDIA_TYPE:
        fields = await _read_fields(request)
        try:
            data = _take_json(fields)
            body = await parse_body(data, request)
            if len(data) > _IN_PLACE_BYTES:
                await asyncio.to_thread(attach, body, _files(fields))
            else:
                attach(body, _files(fields))
        except BaseException:
            close_files(fields)
            raise
        return body
    if media_type != "application/json":
        raise UnsupportedMediaType(f"The content type must be application/json or {MEDIA_TYPE}.")
    return await _read_json(request)


async def read_upload(request: Request) -> tuple[dict[str, Any], ArrivingFile]:
    """An upload's JSON, empty if it has none, and its one tensor file. Raises APIError."""
    media_type = media_type_of(request)
    if media_type == MEDIA_TYPE:
        fields = await _read_fields(request, is_upload=True)
        try:
            body = await parse_body(_take_json(fields), request) if JSON_FIELD in fields else {}
            if len(fields) != 1:
                raise InvalidRequest(
                    f"An upload has one field with a tensor file (beside {JSON_FIELD}, if that is there);"
                    f" this one has {len(fields)}.",
                    param=JSON_FIELD,
                )
        except BaseException:
            close_files(fields)
            raise
        return body, _files(fields).popitem()[1]
    if media_type != _RAW_TYPE:
        raise UnsupportedMediaType(f"The content type must be {_RAW_TYPE} or {MEDIA_TYPE}.")
    file = _new_file(request, is_upload=True)
    try:
        async for chunk in _chunks(request):
            file.add(chunk)
            await file.keep_up()
    except BaseException:
        file.close()
        raise
    return {}, file


def _new_file(request: Request, *, is_upload: bool = False) -> ArrivingFile:
    model = services_of(request).model
    return ArrivingFile(model.hidden_size, model.dtype, model.max_model_len, whole_digest=is_upload)


async def _read_json(request: Request) -> dict[str, Any]:
    """`body.read_json`, with embeddings as `ArrivingString`s where they can be."""
    if not services_of(request).enable_prompt_embeds:
        return await read_json(request)  # there is nothing to be made of them
    body, chunks = ArrivingJson(lambda: _new_file(request)), _chunks(request)
    try:
        async for chunk in chunks:
            body.add(chunk)
            await body.keep_up()
        value = await parse_body(body.view, request)
        # Without the strings that have been taken out it is a small body, as a rule.
        if body.has_files and len(body) > _IN_PLACE_BYTES:
            await asyncio.to_thread(body.put_back, value)
        else:
            body.put_back(value)
        return value
    except InvalidRequest:
        body.close()
        async for _ in chunks:  # JSON is read to its end: a connection that closes with the answer would be reset
            pass
        raise
    except BaseException:
        body.close()
        raise


async def _read_fields(request: Request, *, is_upload: bool = False) -> Fields:
    """`JSON_FIELD` as bytes, all others as files."""
    return await read_fields(
        _chunks(request),
        request.headers["content-type"],
        lambda name: None if name == JSON_FIELD else _new_file(request, is_upload=is_upload),
    )


def _files(fields: Fields) -> dict[str, ArrivingFile]:
    """The JSON has been taken out."""
    return {name: file for name, file in fields.items() if isinstance(file, ArrivingFile)}


async def _chunks(request: Request) -> AsyncIterator[bytes]:
    """Raises APIError, that of the body limit included."""
    try:
        async for chunk in request.stream():
            yield chunk
    except ClientDisconnect:
        # Nobody reads this answer; the status is what the access log shows.
        raise APIError(499, "The client closed the connection before the body was complete.") from None


def _take_json(fields: Fields) -> memoryview:
    """Takes the JSON out of the fields. Raises InvalidRequest."""
    data = fields.pop(JSON_FIELD, None)
    if not isinstance(data, memoryview):
        raise InvalidRequest(f"The multipart body must have a field {JSON_FIELD} with the JSON.", param=JSON_FIELD)
    return data
