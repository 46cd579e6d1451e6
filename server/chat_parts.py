"""One choice of a chat answer, taken apart while it comes: reasoning, content, tool calls. Read by `chat_format`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from server.reasoning.styles import ReasoningStyle
from server.tokenizer import Tokenizer
from server.tools.definitions import ToolRequest
from server.tools.events import CallArguments, CallEnded, CallStarted, Text, ToolEvent
from server.tools.json_calls import JsonCalls
from server.tools.styles import ToolStyle


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call begins. `index` counts the choice's calls."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of a call's arguments (JSON)."""

    index: int
    fragment: str


Part = Reasoning | Content | ToolCall | Arguments


@dataclass(frozen=True, slots=True)
class PartsRules:
    """What may be in the choices of one request."""

    tools: ToolRequest = field(default_factory=ToolRequest)
    tool_style: ToolStyle | None = None
    """Set if the answer may have calls."""
    reasoning: ReasoningStyle | None = None
    begins_in_reasoning: bool = False
    """The prompt ends within the reasoning."""
    tell_reasoning: bool = True
    special_markers: frozenset[str] = frozenset()
    """Markers that are special tokens: the parsers must see them, and nobody else."""

    def shown_token_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """The special tokens that must become text."""
        return frozenset(tokenizer.special_ids(self.special_markers).values())


class ChatParts:
    """`push` text and send what comes back; at the end `flush`. What comes out, put together, does not depend on where
    the text was split.

    White space next to a call belongs to nothing; otherwise every character comes out once.
    """

    def __init__(self, rules: PartsRules) -> None:
        self._rules = rules
        style = rules.reasoning
        self._think = None if style is None else style.parser(is_open=rules.begins_in_reasoning)
        if rules.tool_style is not None:
            self._calls = rules.tool_style.parser(rules.tools.schemas, rules.special_markers)
        else:
            # A parser that knows no calls, but drops the markers that are special tokens.
            self._calls = JsonCalls((), starts=(), hidden=rules.special_markers)
        self._space: list[str] = []
        """Content that is dropped if a call comes next."""
        self._behind_call = False
        self._skips_call = False
        self.num_calls = 0

    @property
    def may_reason(self) -> bool:
        """Whether the next text may belong to the reasoning."""
        return self._think is not None and self._think.may_reason

    @property
    def is_undecided(self) -> bool:
        """Whether the text so far may be the beginning of the reasoning or of the content."""
        return self._think is not None and self._think.is_undecided

    @property
    def reasoning_end(self) -> int | None:
        """How many characters belong to the reasoning; None: all so far."""
        return 0 if self._think is None else self._think.end

    def push(self, text: str) -> list[Part]:
        if self._think is None:
            return _merged(self._from_events(self._calls.push(text)))
        parts: list[Part] = []
        for kind, piece in self._think.push(text):
            parts += self._from_events(self._calls.push(piece)) if kind == "content" else self._reasoning(piece)
        return _merged(parts)

    def flush(self) -> list[Part]:
        parts: list[Part] = []
        for kind, piece in self._think.flush() if self._think is not None else ():
            parts += self._from_events(self._calls.push(piece)) if kind == "content" else self._reasoning(piece)
        parts += self._from_events(self._calls.flush())
        if self._space and not self.num_calls:
            parts.append(Content("".join(self._space)))
        return _merged(parts)

    def _reasoning(self, text: str) -> list[Part]:
        return [Reasoning(text)] if self._rules.tell_reasoning else []

    def _from_events(self, events: Sequence[ToolEvent]) -> list[Part]:
        parts: list[Part] = []
        for event in events:
            match event:
                case Text(text):
                    parts += self._content(text)
                case CallStarted(name):
                    parts += self._begin_call(name)
                case CallArguments(fragment):
                    if not self._skips_call:
                        parts.append(Arguments(self.num_calls - 1, fragment))
                case CallEnded():
                    self._skips_call = False
        return parts

    def _begin_call(self, name: str) -> list[Part]:
        self._space.clear()
        self._behind_call = True
        style = self._rules.tool_style
        if style is None or (self.num_calls and not self._rules.tools.parallel):
            self._skips_call = True
            return []
        self.num_calls += 1
        return [ToolCall(self.num_calls - 1, style.new_id(), name)]

    def _content(self, text: str) -> list[Part]:
        if self._rules.tool_style is None:
            return [Content(text)]
        if self._behind_call:
            text = text.lstrip()
        kept = text.rstrip()
        pieces = [*self._space, kept]
        if kept:
            self._space.clear()
            self._behind_call = False
        if len(kept) < len(text):
            self._space.append(text[len(kept) :])
        return [Content("".join(pieces))] if kept else []


def _merged(parts: Sequence[Part]) -> list[Part]:
    """Neighbours of one kind as one."""
    merged: list[Part] = []
    for _, run in groupby(parts, key=_kind):
        group = list(run)
        first = group[0]
        if isinstance(first, ToolCall) or len(group) == 1:
            merged += group
        elif isinstance(first, Arguments):
            fragments = [part.fragment for part in group if isinstance(part, Arguments)]
            merged.append(Arguments(first.index, "".join(fragments)))
        else:
            text = "".join(part.text for part in group if isinstance(part, Content | Reasoning))
            merged.append(Content(text) if isinstance(first, Content) else Reasoning(text))
    return merged


def _kind(part: Part) -> tuple[type[Part], int]:
    return type(part), part.index if isinstance(part, Arguments | ToolCall) else -1
