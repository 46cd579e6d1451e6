"""Calls as Qwen3-Coder, Qwen 3.5 and their kin write them, each argument between tags of its own:

    <tool_call><function=weather><parameter=city>Paris</parameter><parameter=days>2</parameter></function></tool_call>

with line ends between all of these. An argument is the text as it stands; what it means follows from the function's
schema. Strings are passed on while they come, anything else is waited for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from server.markers import Markers
from server.tools.events import ToolEvent
from server.tools.json_calls import MAX_CALLS
from server.tools.stateful import StatefulParser

START, END = "<tool_call>", "</tool_call>"
_FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER_END = "</parameter>"

_SPACE = re.compile(r"\s++")
_MAX_TAG_CHARS = 256
MAX_ARGUMENTS = 4096
"""Of one answer. What has more is no call that anybody meant."""
_FUNCTION_TAG = re.compile(r"<function=([\w.\-]{1,64})>")
_PARAMETER_TAG = re.compile(r"<parameter=([^<>\n]{1,200})>")
_TAG_SO_FAR = re.compile(r"<(?:[/a-z_]*+|function=[\w.\-]{0,64}+|parameter=[^<>\n]{0,200}+)\Z")
_OTHER_WAYS = {"$ref", "enum", "const", "anyOf", "oneOf", "allOf"}
"""In which a schema may say what it allows, besides `type`."""
_WORDS = {"True": "true", "False": "false", "None": "null"}


class Qwen3CoderParser(StatefulParser):
    """`tools`: the JSON schemas of the functions' arguments."""

    def __init__(self, tools: Mapping[str, Mapping[str, Any]], hidden: frozenset[str] = frozenset()) -> None:
        super().__init__(hidden)
        self._tools = tools
        self._starts = Markers([START, _FUNCTION, *hidden])
        self._value_end = Markers([_PARAMETER_END])
        self._call_ends = Markers([_FUNCTION_END, END])
        self._state = self._content
        self._num_tries = 0
        self._calls_in_block = 0
        self._properties: Mapping[str, Any] = {}
        self._num_arguments = 0
        self._all_arguments = 0
        self._value: list[str] = []
        """Of an argument that is waited for."""
        self._line_end = ""
        """At a string's end it is none of the string's."""
        self._at_start = False

    # --- outside of calls -----------------------------------------------------------------------------------------

    def _content(self, text: str, position: int) -> int:
        found = self._starts.search(text, position)
        if found is None:
            held_from = self._starts.hold_from(text, position)
            self._text(text[position:held_from])
            return self._hold(text, held_from)
        self._text(text[position : found.start()])
        if found.group() in (START, _FUNCTION):
            return self._enter(found)
        return found.end()

    def _enter(self, found: re.Match[str]) -> int:
        self._num_tries += 1
        self._calls_in_block = 0
        if self._num_tries > MAX_CALLS:
            self._starts = Markers(self._hidden)
            return found.start()
        self._state = self._function
        if found.group() != START:
            return found.start()  # some leave the outer tag out
        self._raw.append(START)
        return found.end()

    def _function(self, text: str, position: int) -> int:
        """A function's tag, the block's end, or neither."""
        space = _SPACE.match(text, position)
        if space is not None:
            if not self._calls_in_block:
                self._raw.append(space.group())
            return space.end()
        limit = position + _MAX_TAG_CHARS
        tag = _FUNCTION_TAG.match(text, position, limit)
        if tag is not None and self._calls_in_block < MAX_CALLS:
            self._begin_call(tag[1])
            return tag.end()
        if self._calls_in_block and text.startswith(END, position):
            self._state = self._content
            return position + len(END)
        if len(text) < limit and _TAG_SO_FAR.match(text, position):
            return self._hold(text, position)
        self._give_up()
        self._state = self._content
        if text.startswith(_FUNCTION, position):
            # Not again: it would be taken for a beginning once more.
            self._text(_FUNCTION)
            return position + len(_FUNCTION)
        return position

    def _begin_call(self, name: str) -> None:
        self._start(name)
        self._calls_in_block += 1
        properties = self._tools.get(name, {}).get("properties")
        self._properties = properties if isinstance(properties, dict) else {}
        self._num_arguments = 0
        self._arguments_text("{")
        self._state = self._parameter

    # --- within a call --------------------------------------------------------------------------------------------

    def _parameter(self, text: str, position: int) -> int:
        """An argument's tag, or the function's end."""
        space = _SPACE.match(text, position)
        if space is not None:
            return space.end()
        if text.startswith(_FUNCTION_END, position):
            self._arguments_text("}")
            self._end()
            self._state = self._function
            return position + len(_FUNCTION_END)
        limit = position + _MAX_TAG_CHARS
        tag = _PARAMETER_TAG.match(text, position, limit)
        if tag is not None and self._all_arguments < MAX_ARGUMENTS:
            self._begin_value(tag[1])
            return tag.end()
        if len(text) < limit and _TAG_SO_FAR.match(text, position):
            return self._hold(text, position)
        self._state = self._broken
        return position

    def _begin_value(self, name: str) -> None:
        comma = ", " if self._num_arguments else ""
        self._num_arguments += 1
        self._all_arguments += 1
        self._arguments_text(f"{comma}{json.dumps(name, ensure_ascii=False)}: ")
        self._at_start, self._line_end = True, ""
        self._schema = self._properties.get(name)
        if _is_string(self._schema):
            self._arguments_text('"')
            self._state = self._string
        else:
            self._state = self._other_value

    def _string(self, text: str, position: int) -> int:
        found = self._value_end.search(text, position)
        behind = self._value_end.hold_from(text, position) if found is None else found.start()
        piece = text[position:behind]
        if piece:
            if self._at_start:
                piece = piece.removeprefix("\n")
                self._at_start = False
            piece = self._line_end + piece
            self._line_end = "\n" if piece.endswith("\n") else ""
            self._arguments_text(json.dumps(piece.removesuffix("\n"), ensure_ascii=False)[1:-1])
        if found is None:
            return self._hold(text, behind)
        self._arguments_text('"')
        self._state = self._parameter
        return found.end()

    def _other_value(self, text: str, position: int) -> int:
        found = self._value_end.search(text, position)
        behind = self._value_end.hold_from(text, position) if found is None else found.start()
        self._value.append(text[position:behind])
        if found is None:
            return self._hold(text, behind)
        self._arguments_text(_as_json("".join(self._value), self._schema))
        self._value.clear()
        self._state = self._parameter
        return found.end()

    def _broken(self, text: str, position: int) -> int:
        """Up to the call's end everything belongs to the arguments, as the model wrote it."""
        found = self._call_ends.search(text, position)
        behind = self._call_ends.hold_from(text, position) if found is None else found.start()
        self._arguments_text(text[position:behind])
        if found is None:
            return self._hold(text, behind)
        self._end()
        self._state = self._function
        return found.end() if found.group() == _FUNCTION_END else found.start()

    def flush(self) -> list[ToolEvent]:
        if self._in_call:
            self._arguments_text("".join(self._value))
        elif self._calls_in_block and self._state == self._function:
            self._held = ""  # half an end tag
        return super().flush()


def _types(schema: Any) -> set[str]:
    """The types that a schema names, in any of its ways. Empty: it names none."""
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type")
    found = {each for each in (named if isinstance(named, list) else [named]) if isinstance(each, str)}
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list) else ():
            if isinstance(option, dict) and isinstance(option.get("type"), str):
                found.add(option["type"])
    return found


def _is_string(schema: Any) -> bool:
    """Whether an argument is a string and nothing else; so are those of which nothing is known."""
    if not isinstance(schema, dict):
        return True
    types = _types(schema)
    return types == {"string"} or (not types and not _OTHER_WAYS & schema.keys())


def _as_json(text: str, schema: Any) -> str:
    """An argument that may be something else than a string."""
    inner = text.removeprefix("\n").removesuffix("\n")
    value = _WORDS.get(inner.strip(), inner.strip())
    if "string" in _types(schema) and value != "null":
        return json.dumps(inner, ensure_ascii=False)
    try:
        msgspec.json.decode(value.encode())
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return json.dumps(inner, ensure_ascii=False)
    return value
