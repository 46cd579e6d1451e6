"""From an accepted answer to an HTTP response, whole or streamed: what completions and chat have in common."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from runner.messages import TokenLogprobs
from server.answer import Answer
from server.choices import Delta, TokenRecord
from server.disconnect import ClientGone, unless_gone
from server.errors import APIError
from server.event_stream import EventStream, event
from server.hidden_states import HiddenBlock
from server.ranking import best_choices
from server.schemas import StreamOptions

Json = dict[str, Any]
_encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
_MARK = "\0"
"""Stands for a chunk's text. What comes behind a text has no such character."""
_INLINE_RECORDS = 512
"""Tokens with log-probabilities that are formatted in place: a few milliseconds."""


@dataclass(slots=True)
class WholeChoice:
    """A choice's deltas, concatenated."""

    text: str = ""
    tokens: list[TokenRecord] = field(default_factory=list)
    prompt: list[TokenRecord] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprobs | None] = ()
    """Of every prompt position, if they were asked for."""
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None
    hidden: HiddenBlock | None = None


class Format(Protocol):
    """How one endpoint writes its answers."""

    chunk_object: str
    object: str
    is_text_only: bool
    """Whether the chunks of two deltas that have nothing but texts differ only in those."""

    def whole_choice(self, index: int, choice: WholeChoice) -> Json:
        """An entry of `choices` in a whole answer."""

    def chunk_choices(self, delta: Delta) -> Iterator[Json]:
        """The entries of `choices` that a delta becomes, one chunk each."""

    def extras(self) -> Json:
        """Further members of a whole answer and of a stream's first chunk."""

    def usage_details(self) -> Json:
        """Further members of `usage`, so far."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every body of one answer begins with."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    @classmethod
    def new(cls, prefix: str, model: str, system_fingerprint: str) -> Envelope:
        return cls(f"{prefix}-{secrets.token_hex(16)}", int(time.time()), model, system_fingerprint)

    def body(self, kind: str, choices: Sequence[Json | msgspec.Raw]) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": choices,
        }


async def run_handler(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Run a handler whose body has been read; cancel it when the client leaves."""
    try:
        return await unless_gone(request.receive, work)
    except ClientGone:
        return Response(status_code=499)  # for the access log


async def whole_response(answer: Answer, form: Format, envelope: Envelope, kept: int | None = None) -> Response:
    """`kept`: how many of each prompt's choices are answered, the best ones (None: all). Raises APIError."""
    choices = [WholeChoice() for each in answer.prompts for _ in each.choices]
    texts: list[list[str]] = [[] for _ in choices]
    try:
        async with aclosing(answer.deltas()) as deltas:
            async for delta in deltas:
                choice = choices[delta.index]
                texts[delta.index].append(delta.text)
                choice.tokens += delta.tokens
                choice.prompt += delta.prompt
                choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
                choice.hidden = delta.hidden
    finally:
        answer.close()
    made = len(choices) // len(answer.prompts)
    for index, (choice, pieces) in enumerate(zip(choices, texts, strict=True)):
        choice.text = "".join(pieces)
        choice.prompt_logprobs = answer.prompts[index // made].entries
    told = best_choices(choices, made, made if kept is None else kept)

    def encode() -> bytes:
        # One by one: of a prompt's log-probabilities, which each choice repeats, the objects take ten times the JSON.
        bodies = [msgspec.Raw(_encode(form.whole_choice(index, choice))) for index, choice in enumerate(told)]
        usage = answer.usage.body() | form.usage_details()
        body = envelope.body(form.object, bodies) | form.extras() | {"usage": usage}
        return _encode(body)

    records = sum(len(choice.tokens) + len(choice.prompt) + len(choice.prompt_logprobs) for choice in told)
    records += sum(choice.hidden.num_records for choice in told if choice.hidden is not None)
    return Response(await _run(encode, records), media_type="application/json")


def streamed_response(answer: Answer, form: Format, envelope: Envelope, options: StreamOptions | None) -> Response:
    return EventStream(answer, _Chunks(answer, form, envelope, options or StreamOptions()))


class _Chunks:
    """`event_stream.Events` for the endpoints that stream chunks. What all chunks have in common is encoded once: there
    is a chunk for every token."""

    def __init__(self, answer: Answer, form: Format, envelope: Envelope, options: StreamOptions) -> None:
        self._answer = answer
        self._form = form
        self._envelope = envelope
        self._include_usage = options.include_usage
        self._running_usage = options.include_usage and options.continuous_usage_stats
        self._head = b"data: " + _encode(envelope.body(form.chunk_object, [])).removesuffix(b"]}")
        self._tail = b',"usage":null}\n\n' if options.include_usage and not self._running_usage else b"}\n\n"
        self._extras = form.extras()
        self._has_frames = form.is_text_only and not self._running_usage
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        """By a choice's index: what is around the text in a chunk that has nothing else new in it."""

    def begin(self) -> bytes:
        return b""

    def frame(self, index: int) -> tuple[bytes, bytes] | None:
        if not self._has_frames or self._extras:
            return None
        frame = self._frames.get(index)
        if frame is None:
            # A chunk like any other, cut at its text.
            before, _, after = self._encode(Delta(index, _MARK)).rpartition(_encode(_MARK))
            frame = self._frames[index] = before, after
        return frame

    def encode(self, delta: Delta) -> bytes:
        has_more = delta.is_first or delta.finish_reason is not None or delta.tokens or delta.prompt
        frame = None if has_more or not delta.text else self.frame(delta.index)
        return self._encode(delta) if frame is None else frame[0] + _encode(delta.text) + frame[1]

    def _encode(self, delta: Delta) -> bytes:
        parts: list[bytes] = []
        for choice in self._form.chunk_choices(delta):
            parts += (self._head, _encode(choice), b"]")
            more = self._extras
            if self._running_usage:
                more = more | {"usage": self._usage()}
            if more:
                parts += (b",", _encode(more)[1:-1])
                self._extras = {}
            parts.append(self._tail)
        return b"".join(parts)

    async def end(self) -> bytes:
        if not self._include_usage:
            return DONE
        return event(self._envelope.body(self._form.chunk_object, []) | {"usage": self._usage()}) + DONE

    def fail(self, error: APIError) -> bytes:
        return event(error.body()) + DONE

    def _usage(self) -> Json:
        return self._answer.usage.body() | self._form.usage_details()


async def _run(encode: Callable[[], bytes], records: int) -> bytes:
    """In a thread where there are so many log-probabilities that the event loop would be late for others."""
    return encode() if records <= _INLINE_RECORDS else await asyncio.to_thread(encode)
