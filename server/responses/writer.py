"""The output of one response while it is made: parts of the answer in, items and the events about them out.

Whole and streamed responses are made by the same writer, so that what a stream's events add up to is the whole.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

from server.chat_parts import Arguments, Content, Part, Reasoning, ToolCall

Json = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]


class _Item(Protocol):
    """An item that is open. `output_index` and `sequence_number` are added to its events by the writer."""

    id: str

    def body(self, status: Status) -> Json:
        """As it is so far."""

    def begin(self) -> Iterator[Json]:
        """The events behind `response.output_item.added`."""

    def end(self) -> Iterator[Json]:
        """The events before `response.output_item.done`."""


class _Text:
    """A message, or a reasoning: an item with one part, which is text."""

    def __init__(self, kind: Literal["message", "reasoning"]) -> None:
        self.kind = kind
        self.id = new_id("msg" if kind == "message" else "rs")
        self._event = "response.output_text" if kind == "message" else "response.reasoning_text"
        self._pieces: list[str] = []
        self._logprobs: list[Json] = []
        self._has_part = False

    def add(self, text: str, logprobs: Sequence[Json]) -> Json:
        self._pieces.append(text)
        self._logprobs += logprobs
        return self._about(f"{self._event}.delta", delta=text, **self._more(logprobs))

    def body(self, status: Status) -> Json:
        content = [self._part()] if self._has_part else []
        if self.kind == "message":
            return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}
        return {"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content}

    def begin(self) -> Iterator[Json]:
        self._has_part = True
        yield self._about("response.content_part.added", part=self._part())

    def end(self) -> Iterator[Json]:
        yield self._about(f"{self._event}.done", text="".join(self._pieces), **self._more(self._logprobs))
        yield self._about("response.content_part.done", part=self._part())

    def _part(self) -> Json:
        text = "".join(self._pieces)
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs)}

    def _about(self, kind: str, **members: Any) -> Json:
        return {"type": kind, "item_id": self.id, "content_index": 0, **members}

    def _more(self, logprobs: Sequence[Json]) -> Json:
        return {"logprobs": list(logprobs)} if self.kind == "message" else {}


class _Call:
    def __init__(self, call: ToolCall) -> None:
        self.id = new_id("fc")
        self._call = call
        self._pieces: list[str] = []

    def add(self, fragment: str) -> Json:
        self._pieces.append(fragment)
        return self._about("response.function_call_arguments.delta", delta=fragment)

    def body(self, status: Status) -> Json:
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self._call.id,
            "name": self._call.name,
            "arguments": "".join(self._pieces),
        }

    def begin(self) -> Iterator[Json]:
        yield from ()

    def end(self) -> Iterator[Json]:
        arguments = "".join(self._pieces)
        yield self._about("response.function_call_arguments.done", name=self._call.name, arguments=arguments)

    def _about(self, kind: str, **members: Any) -> Json:
        return {"type": kind, "item_id": self.id, **members}


class OutputWriter:
    """`items`: those that are complete. Events come without a `sequence_number`."""

    def __init__(self) -> None:
        self.items: list[Json] = []
        self._open: _Item | None = None

    def write(self, parts: Sequence[Part], logprobs: Sequence[Json] = ()) -> Iterator[Json]:
        """`logprobs`: of the message's tokens that have come since the last call, in chat's shape."""
        for part in parts:
            match part:
                case Content(text):
                    yield from self._text("message", text, logprobs)
                    logprobs = ()
                case Reasoning(text):
                    yield from self._text("reasoning", text, ())
                case ToolCall():
                    yield from self._begin(_Call(part))
                case Arguments(_, fragment):
                    if isinstance(self._open, _Call):
                        yield self._placed(self._open.add(fragment))
        if logprobs:
            yield from self._text("message", "", logprobs)

    def finish(self, status: Literal["completed", "incomplete"]) -> Iterator[Json]:
        """Whatever is open ends with `status`; a response without any item gets an empty message."""
        if self._open is None and not self.items:
            yield from self._begin(_Text("message"))
        yield from self._end(status)

    def unfinished(self) -> list[Json]:
        """Every item so far, for a response that failed."""
        return self.items + ([] if self._open is None else [self._open.body("incomplete")])

    def _text(self, kind: Literal["message", "reasoning"], text: str, logprobs: Sequence[Json]) -> Iterator[Json]:
        item = self._open
        if not isinstance(item, _Text) or item.kind != kind:
            item = _Text(kind)
            yield from self._begin(item)
        yield self._placed(item.add(text, logprobs))

    def _begin(self, item: _Item) -> Iterator[Json]:
        yield from self._end("completed")
        self._open = item
        yield self._placed({"type": "response.output_item.added", "item": item.body("in_progress")})
        for event in item.begin():
            yield self._placed(event)

    def _end(self, status: Literal["completed", "incomplete"]) -> Iterator[Json]:
        item = self._open
        if item is None:
            return
        for event in item.end():
            yield self._placed(event)
        body = item.body(status)
        yield self._placed({"type": "response.output_item.done", "item": body})
        self._open = None
        self.items.append(body)

    def _placed(self, event: Json) -> Json:
        event["output_index"] = len(self.items)
        return event


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"
