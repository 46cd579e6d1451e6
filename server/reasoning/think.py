"""Reasoning between two markers at the beginning of an answer, told from the answer while both come in pieces."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from server.markers import Markers

_SPACE = re.compile(r"\s++")

Kind = Literal["reasoning", "content"]


@dataclass(frozen=True, slots=True)
class ThinkMarkers:
    start: str
    end: str


class ThinkParser:
    """One choice's parser. White space around the markers belongs to neither part; an answer without reasoning stays as
    it is. What comes out does not depend on where the text was split; the time is linear in its length.
    """

    def __init__(self, markers: ThinkMarkers, *, is_open: bool) -> None:
        """`is_open`: the prompt ends within the reasoning, so the first text is already part of it."""
        self._start = markers.start
        self._is_open = is_open
        self._ends = Markers([markers.end])
        self._state = self._begin
        self._held = ""
        """Half a marker."""
        self._space: list[str] = []
        """White space that is dropped if a marker comes next."""
        self._consumed = 0
        """Characters of the text, those held included."""
        self._out: list[tuple[Kind, str]] = []
        self.end: int | None = None if is_open else 0
        """How many characters of the text belong to the reasoning, its markers included; None while it goes on."""

    @property
    def is_undecided(self) -> bool:
        """Whether the text so far may be the beginning of either part."""
        return self._state == self._begin

    @property
    def may_reason(self) -> bool:
        """Whether the next text may belong to the reasoning."""
        return self.end is None or self._state == self._begin

    def push(self, text: str) -> list[tuple[Kind, str]]:
        """What the next piece of text makes certain, in order."""
        self._consumed -= len(self._held)
        text, self._held = self._held + text, ""
        position = 0
        while position < len(text):
            position = self._state(text, position)
        self._consumed += len(text)
        return self._take()

    def flush(self) -> list[tuple[Kind, str]]:
        """The rest, when no more text comes."""
        held, self._held = self._held, ""
        if self._state == self._begin and not self._is_open:
            self._emit("content", "".join(self._space) + held)
            self._state = self._content
        elif held:
            self._emit("reasoning", "".join(self._space) + held)
        return self._take()

    def _take(self) -> list[tuple[Kind, str]]:
        out, self._out = self._out, []
        return out

    def _begin(self, text: str, position: int) -> int:
        """The start marker, reasoning that the prompt has begun, or an answer without any."""
        space = _SPACE.match(text, position)
        if space is not None:
            self._space.append(space.group())
            return space.end()
        if text.startswith(self._start, position):
            self._space.clear()
            self.end = None
            self._state = self._lead
            return position + len(self._start)
        if len(text) - position < len(self._start) and self._start.startswith(text[position:]):
            self._held = text[position:]
            return len(text)
        if self._is_open:
            self._space.clear()
            self._state = self._thinking
        else:
            self._emit("content", "".join(self._space))
            self._state = self._content
        return position

    def _lead(self, text: str, position: int) -> int:
        space = _SPACE.match(text, position)
        if space is not None:
            return space.end()
        self._state = self._thinking
        return position

    def _thinking(self, text: str, position: int) -> int:
        found = self._ends.search(text, position)
        behind = self._ends.hold_from(text, position) if found is None else found.start()
        self._reason(text[position:behind])
        if found is None:
            self._held = text[behind:]
            return len(text)
        self.end = self._consumed + found.end()
        self._state = self._behind
        return found.end()

    def _reason(self, text: str) -> None:
        kept = text.rstrip()
        if kept:
            self._emit("reasoning", "".join(self._space) + kept)
            self._space.clear()
        self._space.append(text[len(kept) :])

    def _behind(self, text: str, position: int) -> int:
        space = _SPACE.match(text, position)
        if space is not None:
            return space.end()
        self._state = self._content
        return position

    def _content(self, text: str, position: int) -> int:
        self._emit("content", text[position:])
        return len(text)

    def _emit(self, kind: Kind, text: str) -> None:
        if text:
            self._out.append((kind, text))
