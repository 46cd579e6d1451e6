"""What the tool parsers have in common: a state machine over text that comes in pieces."""

from __future__ import annotations

from collections.abc import Callable

from server.tools.events import CallArguments, CallEnded, CallStarted, Text, ToolEvent

State = Callable[[str, int], int]
"""(text, position) to the next position. A state gets on, or becomes another one, or holds the rest back."""


class StatefulParser:
    """`_state` is run until the text is used up. `_raw` is what a call that is not certain yet was made of."""

    def __init__(self, hidden: frozenset[str] = frozenset()) -> None:
        """`hidden`: markers that are special tokens; they are never content, as without a parser they would not be."""
        self._state: State
        self._hidden = hidden
        self._held = ""
        """At most a few hundred characters: they are looked at again with the next piece."""
        self._raw: list[str] = []
        self._events: list[ToolEvent] = []
        self._in_call = False

    def push(self, text: str) -> list[ToolEvent]:
        if self._held:
            text, self._held = self._held + text, ""
        position, end = 0, len(text)
        while position < end:
            position = self._state(text, position)
        return self._take()

    def flush(self) -> list[ToolEvent]:
        """Subclasses have dealt with what they held for certain; what is left in a call belongs to its arguments."""
        held, self._held = self._held, ""
        if self._in_call:
            self._arguments_text(held)
            self._end()
        else:
            self._raw.append(held)
            self._give_up()
        return self._take()

    def _take(self) -> list[ToolEvent]:
        events, self._events = self._events, []
        return events

    def _hold(self, text: str, position: int) -> int:
        self._held = text[position:]
        return len(text)

    def _text(self, text: str) -> None:
        if text:
            self._events.append(Text(text))

    def _give_up(self) -> None:
        """What was taken for a call is text."""
        for piece in self._raw:
            if piece not in self._hidden:
                self._text(piece)
        self._raw.clear()

    def _start(self, name: str) -> None:
        self._raw.clear()
        self._in_call = True
        self._events.append(CallStarted(name))

    def _arguments_text(self, fragment: str) -> None:
        if fragment:
            self._events.append(CallArguments(fragment))

    def _end(self) -> None:
        self._in_call = False
        self._events.append(CallEnded())
