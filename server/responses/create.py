"""From an accepted chat answer to a response, whole or streamed. Called by `routes`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Literal

import msgspec
from starlette.responses import Response

from server.chat import OpenChat
from server.chat_format import ChoiceParts
from server.chat_parts import Content, Part
from server.choices import Delta, TokenRecord
from server.errors import APIError
from server.event_stream import EventStream
from server.logprobs import LogprobFormat
from server.responses.head import ResponseHead
from server.responses.writer import OutputWriter
from server.services import Services

Json = dict[str, Any]
_encode = msgspec.json.Encoder().encode

_INLINE_LOGPROBS = 512
"""Tokens with log-probabilities that are encoded in place: a few milliseconds."""

Keep = Callable[[Json, bytes], Awaitable[bool]]
"""Called with a response that has ended well, and the same as JSON; tells whether it is kept."""


class ResponseAnswer:
    """An answer on its way to becoming a response."""

    def __init__(self, chat: OpenChat, head: ResponseHead, services: Services, keep: Keep) -> None:
        self.head = head
        self.answer = chat.answer
        self._keep = keep
        self._parts = None if chat.rules is None else ChoiceParts(chat.rules)
        """None: the answer is content."""
        self._writer = OutputWriter()
        self._logprobs = LogprobFormat(services.tokenizer.vocabulary) if chat.request.logprobs else None
        self._waiting: deque[TokenRecord] = deque()
        """Tokens of which it is not known yet whether they belong to the reasoning."""
        self._num_logprobs = 0
        self._status: Literal["completed", "incomplete"] = "completed"

    def feed(self, delta: Delta) -> Iterator[Json]:
        """The events that a delta becomes."""
        is_last = delta.finish_reason is not None
        if self._parts is not None:
            parts: list[Part] = self._parts.add(delta.text, delta.tokens, is_last=is_last)
        else:
            parts = [Content(delta.text)] if delta.text else []
        yield from self._writer.write(parts, () if self._logprobs is None else self._entries(delta.tokens))
        if is_last:
            self._status = "incomplete" if delta.finish_reason == "length" else "completed"
            yield from self._writer.finish(self._status)

    async def end(self) -> tuple[Json, bytes]:
        """The whole response, and the same as JSON; it is kept now."""
        usage = self.answer.usage
        reasoning_tokens = 0 if self._parts is None else self._parts.reasoning_tokens
        body = self.head.ended(self._status, self._writer.items, usage, reasoning_tokens)
        data = await self._encoded(body)
        if not await self._keep(body, data) and body["store"]:
            body["store"] = False
            data = await self._encoded(body)
        return body, data

    async def _encoded(self, body: Json) -> bytes:
        return _encode(body) if self._num_logprobs <= _INLINE_LOGPROBS else await asyncio.to_thread(_encode, body)

    def failed(self, error: APIError) -> Json:
        return self.head.failed(error, self._writer.unfinished())

    def cancelled(self) -> Json:
        return self.head.cancelled(self._writer.unfinished())

    def _entries(self, tokens: Sequence[TokenRecord]) -> list[Json]:
        """The log-probabilities of those tokens that are the message's."""
        if self._logprobs is None:
            return []
        self._waiting += tokens
        end = 0 if self._parts is None else self._parts.reasoning_end
        if end is None or (self._parts is not None and self._parts.is_undecided):
            return []
        records = [record for record in self._waiting if record.offset >= end]
        self._waiting.clear()
        self._num_logprobs += len(records)
        entries: list[Json] = self._logprobs.chat(records)["content"]
        return entries


async def whole(answer: ResponseAnswer) -> Response:
    """Raises APIError."""
    try:
        async with aclosing(answer.answer.deltas()) as deltas:
            async for delta in deltas:
                deque(answer.feed(delta), maxlen=0)
        _, data = await answer.end()
    finally:
        answer.answer.close()
    return Response(data, media_type="application/json")


def streamed(answer: ResponseAnswer) -> Response:
    return EventStream(answer.answer, _ResponseEvents(answer))


class _ResponseEvents:
    """`event_stream.Events`: named ones, and no [DONE], since the last one says how it ended."""

    def __init__(self, answer: ResponseAnswer) -> None:
        self._answer = answer
        self._number = 0

    def begin(self) -> bytes:
        running = self._answer.head.running()
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event({"type": kind, "response": running}) for kind in kinds)

    def frame(self, index: int) -> None:
        return None  # events are numbered

    def encode(self, delta: Delta) -> bytes:
        return b"".join(map(self._event, self._answer.feed(delta)))

    async def end(self) -> bytes:
        body, data = await self._answer.end()
        return self._event({"type": f"response.{body['status']}", "response": msgspec.Raw(data)})

    def fail(self, error: APIError) -> bytes:
        return self._event({"type": "response.failed", "response": self._answer.failed(error)})

    def _event(self, event: Json) -> bytes:
        event["sequence_number"] = self._number
        self._number += 1
        kind: str = event["type"]
        return b"event: " + kind.encode() + b"\ndata: " + _encode(event) + b"\n\n"
