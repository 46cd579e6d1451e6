"""Calls written as JSON objects, `{"name": …, "arguments": {…}}`: what the Hermes, Llama 3 and Mistral styles share.

They differ in the markers around the objects. A call is certain when its object has begun with a name and the opening
brace of its arguments; from there on these are passed on as they come. Objects that begin in another way (arguments
before the name, arguments as a string) are waited for, and decoded as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence

import msgspec

from server.markers import Markers
from server.tools.events import ToolEvent
from server.tools.json_value import JsonValue
from server.tools.stateful import State, StatefulParser

MAX_NAME_CHARS = 64
MAX_CALLS = 128
"""Of one answer. What follows is text: a model that has not stopped by then never will."""
_MAX_HEAD_CHARS = 512
"""An object whose beginning is longer than that is waited for. (It is looked at again with each piece until then.)"""

_NAME = r'"([^"\\{}\x00-\x1f]{1,64})"'
_HEAD = re.compile(
    rf'\{{\s*+(?:"type"\s*+:\s*+"function"\s*+,\s*+)?"name"\s*+:\s*+{_NAME}\s*+,\s*+"(?:arguments|parameters)"\s*+:\s*+'
    r"(?=\{)"
)
_FIRST_KEY = re.compile(r'\{\s*+"((?:[^"\\]++|\\.)*+)"\s*+:(?:\s*+"((?:[^"\\]++|\\.)*+)")?+', re.DOTALL)
_NOT_AN_OBJECT = re.compile(r'\{\s*+[^\s"}]')
_CALL_KEYS = frozenset({"name", "arguments", "parameters", "type", "function", "id"})
_BETWEEN = re.compile(r"(?:[\s\],;]++|\[(?![A-Z]|\Z))++")
"""White space and a list's punctuation. A `[` may also begin a marker of Mistral's."""
_SPACE = re.compile(r"\s++")


class JsonCalls(StatefulParser):
    """`starts`, `ends`: the markers around calls; no call begins without one, unless it is `bare`.

    `bare`: the text may also begin with a call; then only the names in `names` are calls', for it may as well be an
    answer that is JSON.
    """

    def __init__(
        self,
        names: Container[str],
        *,
        starts: Sequence[str],
        ends: Sequence[str] = (),
        others: Sequence[str] = (),
        bare: bool = False,
        hidden: frozenset[str] = frozenset(),
    ) -> None:
        """`others`: further markers, which are dropped where they are special tokens."""
        super().__init__(hidden)
        self._names = names
        self._starts = frozenset(starts)
        self._content_markers = Markers([*starts, *hidden])
        self._call_markers = Markers([*starts, *ends, *others])
        self._state = self._begin if bare else self._content
        self._is_bare = False
        """The call at hand has no marker in front."""
        self._num_calls = 0
        self._num_tries = 0
        self._calls_in_block = 0
        self._value = JsonValue()
        self._after_arguments: State = self._tail

    # --- outside of calls -----------------------------------------------------------------------------------------

    def _begin(self, text: str, position: int) -> int:
        found = _SPACE.match(text, position)
        if found is not None:
            self._raw.append(found.group())
            return found.end()
        if text[position] == "{":
            self._is_bare = True
            self._calls_in_block = 0
            self._state = self._object
        else:
            self._back_to_content()
        return position

    def _content(self, text: str, position: int) -> int:
        found = self._content_markers.search(text, position)
        if found is None:
            held_from = self._content_markers.hold_from(text, position)
            self._text(text[position:held_from])
            return self._hold(text, held_from)
        self._text(text[position : found.start()])
        if found.group() in self._starts:
            self._enter(found.group())
        return found.end()

    def _enter(self, marker: str) -> None:
        self._raw.append(marker)
        self._is_bare = False
        self._calls_in_block = 0
        self._num_tries += 1
        if self._num_tries > MAX_CALLS:
            self._content_markers = Markers(self._hidden)
            self._back_to_content()
        else:
            self._state = self._between

    def _between(self, text: str, position: int) -> int:
        """Behind a start marker or a call: the next call, the end marker, or neither."""
        found = _BETWEEN.match(text, position)
        if found is not None:
            if not self._calls_in_block:
                self._raw.append(found.group())
            return found.end()
        if text[position] == "{":
            self._state = self._object if self._num_calls < MAX_CALLS else self._content
            return position
        marker = self._call_markers.match(text, position)
        if marker is not None:
            return self._at_marker(marker)
        if self._call_markers.may_begin_at(text, position) or text[position:] == "[":
            return self._hold(text, position)
        return self._other(text, position)

    def _at_marker(self, marker: re.Match[str]) -> int:
        if marker.group() in self._starts:
            if not self._calls_in_block:
                self._give_up()
            self._enter(marker.group())
            return marker.end()
        self._raw.append(marker.group())
        if self._calls_in_block:
            self._raw.clear()
        self._back_to_content()
        return marker.end()

    def _other(self, text: str, position: int) -> int:
        """Something else than a JSON object where a call might be."""
        self._back_to_content()
        return position

    def _back_to_content(self) -> None:
        self._give_up()
        self._state = self._content

    # --- a call ---------------------------------------------------------------------------------------------------

    def _object(self, text: str, position: int) -> int:
        """text[position] is the object's brace."""
        limit = position + _MAX_HEAD_CHARS
        head = _HEAD.match(text, position, limit)
        if head is not None and self._is_known(head[1]):
            self._call(head[1], then=self._tail)
            return head.end()
        if head is not None or self._is_something_else(text, position, limit):
            self._back_to_content()
            return position
        if len(text) < limit and "}" not in text[position:]:
            return self._hold(text, position)
        self._value = JsonValue()
        self._state = self._whole_object
        return position

    def _is_known(self, name: str) -> bool:
        return name in self._names if self._is_bare else bool(name.strip())

    def _is_something_else(self, text: str, position: int, limit: int) -> bool:
        """Whether the object cannot be a call, as far as its beginning tells. Without a marker more is asked of it:
        an answer that is JSON should not wait for its end."""
        if _NOT_AN_OBJECT.match(text, position, limit):
            return True
        key = _FIRST_KEY.match(text, position, limit) if self._is_bare else None
        if key is None:
            return False
        if key[1] == "name":
            return key[2] is not None and key[2] not in self._names
        return key[1] not in _CALL_KEYS

    def _whole_object(self, text: str, position: int) -> int:
        behind = self._value.scan(text, position)
        self._raw.append(text[position:behind])
        if self._value.ended:
            self._decode("".join(self._raw[self._raw_start() :]))
        elif self._value.broken:
            self._back_to_content()
        return behind

    def _raw_start(self) -> int:
        """Where in `_raw` the object begins."""
        return next(index for index, piece in enumerate(self._raw) if piece.startswith("{"))

    def _decode(self, raw: str) -> None:
        call = decode_call(raw)
        if call is None or not self._is_known(call[0]):
            self._back_to_content()
            return
        self._call(call[0], then=self._between)
        self._arguments_text(call[1])
        self._end()
        self._state = self._between

    def _call(self, name: str, *, then: State) -> None:
        """A call is certain; its arguments come next."""
        self._start(name)
        self._state = self._arguments
        self._after_arguments = then
        self._num_calls += 1
        self._calls_in_block += 1
        self._value = JsonValue()

    def _arguments(self, text: str, position: int) -> int:
        behind = self._value.scan(text, position)
        self._arguments_text(text[position:behind])
        if self._value.ended:
            self._end()
            self._state = self._after_arguments
        elif self._value.broken:
            self._state = self._broken_arguments
        return behind

    def _broken_arguments(self, text: str, position: int) -> int:
        """Up to the next marker everything belongs to them."""
        found = self._call_markers.search(text, position)
        behind = self._call_markers.hold_from(text, position) if found is None else found.start()
        self._arguments_text(text[position:behind])
        if found is None:
            return self._hold(text, behind)
        self._end()
        self._state = self._between
        return behind

    def _tail(self, text: str, position: int) -> int:
        """The rest of the object: its closing brace, perhaps further members, which mean nothing."""
        found = _SPACE.match(text, position)
        if found is not None:
            return found.end()
        if text[position] == ",":
            self._value = JsonValue("{")
            self._state = self._members
            return position + 1
        self._state = self._between
        return position + 1 if text[position] == "}" else position

    def _members(self, text: str, position: int) -> int:
        behind = self._value.scan(text, position)
        if self._value.ended or self._value.broken:
            self._state = self._between
        return behind

    def flush(self) -> list[ToolEvent]:
        if not self._in_call and self._calls_in_block and self._state in (self._between, self._tail, self._members):
            self._held = ""  # separators, or half an end marker
        return super().flush()


def decode_call(raw: str) -> tuple[str, str] | None:
    """A JSON object as (name, arguments as JSON). None if it is no call."""
    try:
        call = msgspec.json.decode(raw.encode())
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return None
    if isinstance(call.get("function"), dict):
        call = call["function"]
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        return None
    if arguments is None or arguments == "":
        return name, "{}"
    if isinstance(arguments, str):
        return name, arguments
    return (name, msgspec.json.encode(arguments).decode()) if isinstance(arguments, dict) else None
