"""POST /v1/responses, and what can be asked of a response later: GET, DELETE, cancel."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from server.answer_memory import Reserve
from server.body import read_json
from server.chat import open_chat, parse_chat
from server.errors import APIError, InvalidRequest, Unavailable, UnsupportedParameter
from server.openapi import json_body
from server.request_context import release_body
from server.respond import run_handler
from server.responses.background import BackgroundResponse, OwnContext
from server.responses.create import ResponseAnswer, streamed, whole
from server.responses.head import ResponseHead
from server.responses.items import Turn, parse_input, turns_of_output
from server.responses.schema import ResponseRequest
from server.responses.store import MAX_RESPONSE_BYTES, ResponseStore
from server.responses.translate import chat_body, errors_in_our_words, parse_request
from server.responses.writer import new_id
from server.schemas import ChatRequest
from server.services import Services, services_of
from server.structured_outputs import Constraint, constraint_of

router = APIRouter()

_DECODER = msgspec.json.Decoder()
_RUNNING = ("queued", "in_progress")
_CANCEL_SECONDS = 10.0
"""For which a cancelled response is waited for: it ends with the next step."""
_CANCEL_POLL_SECONDS = 0.02
"""Until it is looked at for the first time, then twice as long each time."""
_MAX_POLL_SECONDS = 0.5
_HEADS = 3
"""What a response tells of its request is held, and sent in a stream's first two events."""
_INLINE_BYTES = 256 * 1024
"""A conversation up to this size is read in less time than a thread takes to wake up."""


@router.post("/v1/responses", openapi_extra=json_body(ResponseRequest, streams=True))
async def create_response(request: Request) -> Response:
    # The body has no name here, so that `_create` can let go of it.
    return await run_handler(request, _create(await read_json(request), services_of(request)))


@router.get("/v1/responses/{response_id}")
async def get_response(response_id: str, request: Request) -> Response:
    """A response, as long as it is kept; one in the background also while it is being made."""
    for name in ("stream", "starting_after"):
        if request.query_params.get(name) not in (None, "", "false"):
            raise UnsupportedParameter(f"{name} is not supported: only whole responses can be retrieved.", param=name)
    return Response(await _stored(response_id, services_of(request)), media_type="application/json")


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, request: Request) -> Response:
    """Forget a response. Conversations that it was in cannot be continued any more."""
    services = services_of(request)
    if not await services.responses.delete(response_id):
        raise _not_kept()
    with contextlib.suppress(APIError):  # It is gone, whoever makes it in the background.
        await services.engine.abort_answer(response_id)
    body = {"id": response_id, "object": "response", "deleted": True}
    return Response(msgspec.json.encode(body), media_type="application/json")


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(response_id: str, request: Request) -> Response:
    """End a response in the background; one that has ended is answered as it is."""
    services = services_of(request)
    body = await _stored(response_id, services)
    response = msgspec.json.decode(body, type=_Kept)
    if not response.background:
        told = "Only a response that was created with background: true can be cancelled."
        raise InvalidRequest(told, code="not_running")
    if response.status in _RUNNING:
        await services.engine.abort_answer(response_id)
        body = await _ended(response_id, services)
    return Response(body, media_type="application/json")


async def _create(body: Mapping[str, Any], services: Services) -> Response:
    request = parse_request(body, services)
    del body
    services.model_name(request.model)
    turns = parse_input(request.input)
    # Input may be large, and an answer takes its time: it is held only as far as it is kept.
    request = request.model_copy(update={"input": None})
    keeper = _Keeper.of(request, turns, services)
    opening = _open(request, turns, keeper, services)
    del turns
    if request.background:
        return await _in_background(opening, request, services)
    answer = await opening
    release_body()
    return streamed(answer) if request.stream else await whole(answer)


async def _in_background(
    opening: Coroutine[Any, Any, ResponseAnswer], request: ResponseRequest, services: Services
) -> Response:
    """The response as it is queued."""
    with OwnContext() as context:
        answer = await opening
        response = BackgroundResponse(answer, services.responses, request.previous_response_id, context)
        services.background.start(response.run())
    release_body()
    queued = await asyncio.shield(response.begun)
    if isinstance(queued, APIError):
        raise queued
    return Response(queued, media_type="application/json")


async def _open(request: ResponseRequest, turns: Sequence[Turn], keeper: _Keeper, services: Services) -> ResponseAnswer:
    """Accepted by the engine. Raises APIError."""
    # Held until the response ends, longer than the body is.
    services.answer_memory.reserve(keeper.nbytes)
    response_id = new_id("resp")
    with services.answer_memory.held() as reserve:
        turns = [*await _before(request.previous_response_id, services, reserve), *turns]
        chat_request, constraint = _as_chat(request, turns, services)
        del turns
        opening = open_chat(chat_request, constraint, services, response_id)
        del chat_request, constraint
        with errors_in_our_words():
            chat = await opening
    head = ResponseHead.new(response_id, request, services, stored=keeper.keeps)
    services.answer_memory.reserve(_HEADS * head.nbytes)
    return ResponseAnswer(chat, head, services, keeper.keep)


def _as_chat(
    request: ResponseRequest, turns: Sequence[Turn], services: Services
) -> tuple[ChatRequest, Constraint | None]:
    with errors_in_our_words():
        body = chat_body(request, turns)
        return parse_chat(body, services), constraint_of(body)


# --- what is kept -----------------------------------------------------------------------------------------------------


class _Keeper:
    """Keeps a response once it has ended. `turns`: what its request adds to the conversation, as JSON. `replaces`: as
    `ResponseStore.put`."""

    def __init__(
        self, store: ResponseStore, turns: bytes, previous: str | None, *, keeps: bool, replaces: bool
    ) -> None:
        self.keeps = keeps
        self._replaces = replaces
        self._store = store
        self._turns = turns
        self._previous = previous

    @property
    def nbytes(self) -> int:
        """What it holds meanwhile."""
        return len(self._turns)

    @classmethod
    def of(cls, request: ResponseRequest, turns: Sequence[Turn], services: Services) -> _Keeper:
        keeps, data = request.store is not False, b""
        if keeps:
            data = msgspec.json.encode(turns)
            keeps = len(data) < MAX_RESPONSE_BYTES
        previous, replaces = request.previous_response_id, bool(request.background)
        return cls(services.responses, data if keeps else b"", previous, keeps=keeps, replaces=replaces)

    async def keep(self, body: Mapping[str, Any], data: bytes) -> bool:
        """Whether it is kept: it may have become too large. The client gets it either way, but in the background: there
        it is kept however long the runner takes."""
        if not self.keeps:
            return False
        turns = self._turns + b"\n" + msgspec.json.encode(turns_of_output(body["output"]))
        try:
            problem = await self._store.put(
                body["id"], data, turns, self._previous, replaces=self._replaces, surely=self._replaces
            )
            return not problem
        except APIError:  # the runner does not take it, or has gone
            return False


async def _before(response_id: str | None, services: Services, reserve: Reserve) -> list[Turn]:
    """The conversation up to and with this response. Raises InvalidRequest."""
    if response_id is None:
        return []
    kept = await services.responses.conversation(response_id, reserve)
    if kept is None:
        raise InvalidRequest(
            "previous_response_id: this response, or one before it in its conversation, is not kept here.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    size = sum(map(len, kept))
    return _decoded(kept) if size <= _INLINE_BYTES else await asyncio.to_thread(_decoded, kept)


def _decoded(kept: Sequence[memoryview]) -> list[Turn]:
    """Each is two lists, in a line each."""
    return [turn for data in kept for turns in _DECODER.decode_lines(data) for turn in turns]


async def _stored(response_id: str, services: Services, reserve: Reserve | None = None) -> memoryview:
    """`reserve`: without it, for as long as the current request is answered. Raises APIError."""
    body = await services.responses.get(response_id, reserve or services.answer_memory.reserve)
    if body is None:
        raise _not_kept()
    return body


class _Kept(msgspec.Struct):
    """What `cancel` looks at."""

    status: str
    background: bool


async def _ended(response_id: str, services: Services) -> memoryview:
    """A response that is about to end, once it has. Raises APIError."""
    seconds = _CANCEL_POLL_SECONDS
    try:
        async with asyncio.timeout(_CANCEL_SECONDS):
            while await _is_running(response_id, services):
                await asyncio.sleep(seconds)
                seconds = min(2 * seconds, _MAX_POLL_SECONDS)
    except TimeoutError:
        raise Unavailable("The response does not end.") from None
    return await _stored(response_id, services)


async def _is_running(response_id: str, services: Services) -> bool:
    with services.answer_memory.held() as reserve:
        body = await _stored(response_id, services, reserve)
        return msgspec.json.decode(body, type=_Kept).status in _RUNNING


def _not_kept() -> APIError:
    return APIError(404, "No response of yours with this id is kept here.", param="response_id", code="not_found")
