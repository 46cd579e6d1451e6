"""Calls as Python, in a list that is the whole answer or stands behind a marker:
`[weather(city="Paris", days=2), time()]` (Llama 3.2 and 4, LFM2)."""

from __future__ import annotations

import re
from collections.abc import Container

from server.markers import Markers
from server.tools.events import ToolEvent
from server.tools.json_calls import MAX_CALLS
from server.tools.python_arguments import PythonArguments
from server.tools.stateful import StatefulParser

STARTS = ("<|tool_call_start|>", "<|python_start|>", "<|python_tag|>")
ENDS = ("<|tool_call_end|>", "<|python_end|>")

_SPACE = re.compile(r"\s++")
_MAX_HEAD_CHARS = 256
_HEAD = re.compile(r"\s*+([A-Za-z_][\w.\-]{0,63})\s*+\(")
_HEAD_SO_FAR = re.compile(r"\s*+(?:[A-Za-z_][\w.\-]{0,63}+\s*+)?\Z")


class PythonicParser(StatefulParser):
    """Only the names in `names` are calls': a text may well begin with a bracket."""

    def __init__(self, names: Container[str], hidden: frozenset[str] = frozenset()) -> None:
        super().__init__(hidden)
        self._names = names
        self._content_markers = Markers([*STARTS, *hidden])
        self._markers = Markers([*STARTS, *ENDS])
        self._state = self._begin
        self._num_calls = 0
        self._num_tries = 0
        self._arguments = PythonArguments()

    def _begin(self, text: str, position: int) -> int:
        """At the beginning of the text, or behind a start marker."""
        space = _SPACE.match(text, position)
        if space is not None:
            self._raw.append(space.group())
            return space.end()
        if text[position] == "[":
            self._raw.append("[")
            self._state = self._head
            return position + 1
        self._back_to_content()
        return position

    def _content(self, text: str, position: int) -> int:
        found = self._content_markers.search(text, position)
        if found is None:
            held_from = self._content_markers.hold_from(text, position)
            self._text(text[position:held_from])
            return self._hold(text, held_from)
        self._text(text[position : found.start()])
        if found.group() in STARTS:
            self._raw.append(found.group())
            self._num_tries += 1
            if self._num_tries > MAX_CALLS:
                self._content_markers = Markers(self._hidden)
                self._back_to_content()
            else:
                self._state = self._begin
        return found.end()

    def _back_to_content(self) -> None:
        self._give_up()
        self._state = self._content

    def _head(self, text: str, position: int) -> int:
        """A call's name and its opening parenthesis."""
        limit = position + _MAX_HEAD_CHARS
        found = _HEAD.match(text, position, limit)
        if found is not None and found[1] in self._names and self._num_calls < MAX_CALLS:
            self._start(found[1])
            self._num_calls += 1
            self._arguments = PythonArguments(self._arguments.steps_left)
            self._state = self._call
            return found.end()
        if found is None and len(text) < limit and _HEAD_SO_FAR.match(text, position):
            return self._hold(text, position)
        self._back_to_content()
        return position

    def _call(self, text: str, position: int) -> int:
        fragment, behind = self._arguments.scan(text, position)
        self._arguments_text(fragment)
        if self._arguments.ended:
            self._end()
            self._state = self._behind_call
        elif self._arguments.broken:
            self._state = self._broken
        elif behind < len(text):
            return self._hold(text, behind)
        return behind

    def _broken(self, text: str, position: int) -> int:
        """Up to the next marker everything belongs to the arguments, as the model wrote it."""
        found = self._markers.search(text, position)
        behind = self._markers.hold_from(text, position) if found is None else found.start()
        self._arguments_text(text[position:behind])
        if found is None:
            return self._hold(text, behind)
        self._end()
        self._state = self._behind_list
        return behind

    def _behind_call(self, text: str, position: int) -> int:
        space = _SPACE.match(text, position)
        if space is not None:
            return space.end()
        if text[position] == ",":
            self._raw.append(",")
            self._state = self._head
            return position + 1
        self._state = self._behind_list
        return position + 1 if text[position] == "]" else position

    def _behind_list(self, text: str, position: int) -> int:
        space = _SPACE.match(text, position)
        if space is not None:
            return space.end()
        if self._markers.may_begin_at(text, position):
            return self._hold(text, position)
        marker = self._markers.match(text, position)
        self._state = self._content
        return marker.end() if marker is not None and marker.group() in ENDS else position

    def flush(self) -> list[ToolEvent]:
        if self._num_calls and self._state in (self._behind_call, self._behind_list):
            self._held = ""  # half an end marker
        return super().flush()
