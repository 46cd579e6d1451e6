"""Reads one streamed answer: server-sent events in, arrival times and counts out. Fed by `http_connection`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from server.bench.http_connection import CallFailed

MAX_EVENT_BYTES = 64 << 20
MAX_ERROR_BYTES = 64 << 10
"""How much of an error's body is kept."""


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _Delta | None = None


class _CachedTokens(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _CachedTokens | None = None


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] = []  # msgspec copies it
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


@dataclass(slots=True)
class CompletionStream:
    """A `ResponseSink`. All times are the connection's clock's, in seconds.

    An event counts as a token's if it has a choice with text; several tokens that a server puts into one event are one
    arrival. Where no event has text (every token special), events with choices take their place.
    """

    status: int | None = None
    first: float | None = None
    """When the first token's event came."""
    last: float | None = None
    """When the last event with a choice came."""
    gaps: list[float] = field(default_factory=list)
    """Seconds between each token's event and the one before."""
    num_events: int = 0
    """Token events."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    is_done: bool = False
    """[DONE] was seen."""
    _previous: float = 0.0
    _first_empty: float | None = None
    _num_empty: int = 0
    _tail: bytes = b""
    _error_body: bytearray = field(default_factory=bytearray)

    def on_status(self, status: int, now: float) -> None:
        self.status = status

    def on_body(self, data: bytes, now: float) -> None:
        """Raises CallFailed on an error event and on what is not an event."""
        if self.status != 200:
            if len(self._error_body) < MAX_ERROR_BYTES:
                self._error_body += data
            return
        pending = self._tail + data if self._tail else data
        if b"\r" in pending:
            pending = pending.replace(b"\r\n", b"\n")
        *events, self._tail = pending.split(b"\n\n")
        for event in events:
            self._on_event(event, now)
        if len(self._tail) > MAX_EVENT_BYTES:
            raise CallFailed("bad_event", f"an event is longer than {MAX_EVENT_BYTES} bytes")

    def finish(self) -> None:
        """The answer has ended. Raises CallFailed where it was an error, or not all of an answer."""
        if self.status != 200:
            raise http_failure(self.status or 0, bytes(self._error_body))
        if not self.is_done:
            raise CallFailed("truncated", "the stream ended without [DONE]")
        if self.first is None:
            self.first, self.num_events = self._first_empty, self._num_empty
        if self.first is None:
            raise CallFailed("no_tokens", "the stream had no token in it")

    def _on_event(self, event: bytes, now: float) -> None:
        payload = event[6:] if event.startswith(b"data: ") and b"\n" not in event else _data_of(event)
        if not payload:
            return
        if payload == b"[DONE]":
            self.is_done = True
            return
        try:
            chunk = _decode(payload)
        except msgspec.MsgspecError as error:
            raise CallFailed("bad_event", f"an event is not a completion chunk: {error}"[:300]) from None
        if chunk.error is not None:
            raise _stream_failure(chunk.error)
        if chunk.choices:
            self._on_choices(chunk.choices, now)
        if chunk.usage is not None:
            self._on_usage(chunk.usage)

    def _on_choices(self, choices: list[_Choice], now: float) -> None:
        self.last = now
        if not any(map(_has_text, choices)):
            self._num_empty += 1
            if self._first_empty is None:
                self._first_empty = now
            return
        if self.first is None:
            self.first = now
        else:
            self.gaps.append(now - self._previous)
        self._previous = now
        self.num_events += 1

    def _on_usage(self, usage: _Usage) -> None:
        self.prompt_tokens, self.completion_tokens = usage.prompt_tokens, usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            self.cached_tokens = usage.prompt_tokens_details.cached_tokens


def http_failure(status: int, body: bytes) -> CallFailed:
    """`http_STATUS`, with the message of an OpenAI-style body or the beginning of any other."""
    message = body[:300].decode("utf-8", "replace")
    try:
        decoded = msgspec.json.decode(body)
        message = _message(decoded.get("error", decoded))
    except (msgspec.MsgspecError, AttributeError, RecursionError, UnicodeError):
        pass
    return CallFailed(f"http_{status}", f"HTTP {status}: {message[:300]}".strip())


def _stream_failure(error: object) -> CallFailed:
    code = error.get("code") if isinstance(error, dict) else None
    suffix = f":{code}"[:60] if isinstance(code, str | int) and not isinstance(code, bool) else ""
    return CallFailed(f"stream_error{suffix}", _message(error)[:300])


def _message(error: object) -> str:
    message = error.get("message", error) if isinstance(error, dict) else error
    return message if isinstance(message, str) else msgspec.json.encode(message).decode()


def _has_text(choice: _Choice) -> bool:
    delta = choice.delta
    return bool(choice.text) or (delta is not None and bool(delta.content or delta.reasoning_content))


def _data_of(event: bytes) -> bytes:
    """The `data` lines of an event that has others too, as the standard joins them."""
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)
