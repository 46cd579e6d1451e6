"""Calls as Mistral's models write them: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, and since the eleventh
version of their tokenizer `[TOOL_CALLS]name[ARGS]{…}`, once for each call."""

from __future__ import annotations

import re
from collections.abc import Container

from server.tools.json_calls import MAX_CALLS, JsonCalls

START, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"

_NAMED = re.compile(r"([\w.\-]{1,64})\s*+(?:\[CALL_ID\]\w{0,64}+)?\s*+(?:\[ARGS\])?\s*+(?=\{)")
_NAME_SO_FAR = re.compile(r"[\w.\-]{1,64}(?=[\s\[]|$)")
_MAX_NAMED_CHARS = 256


class MistralParser(JsonCalls):
    def __init__(self, names: Container[str], hidden: frozenset[str] = frozenset()) -> None:
        super().__init__(names, starts=(START,), others=(ARGS, CALL_ID), hidden=hidden)

    def _other(self, text: str, position: int) -> int:
        if self._num_calls >= MAX_CALLS:
            return super()._other(text, position)
        limit = position + _MAX_NAMED_CHARS
        named = _NAMED.match(text, position, limit)
        if named is not None:
            self._call(named[1], then=self._between)
            return named.end()
        if len(text) < limit and _NAME_SO_FAR.match(text, position):
            return self._hold(text, position)
        return super()._other(text, position)
