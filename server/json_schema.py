"""A client's JSON schema and regular expressions, checked and reduced to what the grammar compiler is given.

What is checked here is what must hold before a library sees them: sizes, depth, and meanings on which dialects differ.
Whether the compiler can honour them it says itself. Runs in a thread: a schema may have thousands of parts.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from server.errors import InvalidRequest

MAX_SCHEMA_BYTES = 256 * 1024
MAX_SCHEMA_DEPTH = 64
MAX_SCHEMA_PARTS = 20_000
"""Members and elements, all levels together."""
MAX_REGEX_CHARS = 8192

_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose members are schemas under names of the client's."""
_DATA = frozenset({"const", "default", "enum", "example", "examples", "required"})
"""Keywords whose values are no schemas, whatever they look like."""
_FORMATS = frozenset({"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"})
"""What the compiler enforces. By the standard `format` is an annotation, so any other is left out."""

_QUANTIFIER = re.compile(r"[*+?]|\{\d+(?:,\d*)?\}")
_INLINE_GROUP = re.compile(r"\(\?(?:P?<[^>]*>|[a-zA-Z-]*[:)]|)")


def parse_schema(value: Any, param: str) -> str:
    """`value`: an object, `true`, or either as JSON text. Returns an object as JSON text; raises InvalidRequest."""
    if isinstance(value, str):
        if len(value) > MAX_SCHEMA_BYTES:
            raise _too_large(param)
        try:
            value = msgspec.json.decode(value)
        except (msgspec.MsgspecError, RecursionError, UnicodeError):
            raise InvalidRequest(f"{param} is not valid JSON.", param=param) from None
    if value is True:
        value = {}
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param} must be a JSON schema: an object.", param=param)
    text = msgspec.json.encode(_Walk(param).schema(value, 1))
    if len(text) > MAX_SCHEMA_BYTES:
        raise _too_large(param)
    return text.decode()


def check_regex(pattern: str, param: str) -> None:
    """Raises InvalidRequest. The syntax is that of Rust's regex crate, where it means what it means elsewhere."""
    if not pattern:
        raise InvalidRequest(f"{param} must not be empty.", param=param)
    if len(pattern) > MAX_REGEX_CHARS:
        raise InvalidRequest(f"{param} must have at most {MAX_REGEX_CHARS} characters.", param=param)
    if _stacks_quantifiers(pattern):
        # `a**` and `a*+`: an error in some dialects, possessive in others, a repetition of a repetition in Rust's.
        raise InvalidRequest(f"{param} has a quantifier behind a quantifier.", param=param)


class _Walk:
    """Copies a schema, counting its parts."""

    def __init__(self, param: str) -> None:
        self._param = param
        self._parts = 0

    def schema(self, value: Any, depth: int) -> Any:
        if not isinstance(value, dict):
            return self._other(value, depth)
        self._count(len(value), depth)
        cleaned = {}
        for key, part in value.items():
            if key == "x-guidance" or (key == "format" and part not in _FORMATS and isinstance(part, str)):
                continue
            if key == "pattern" and isinstance(part, str):
                check_regex(part, self._param)
            if key == "patternProperties" and isinstance(part, dict):
                for pattern in part:
                    check_regex(pattern, self._param)
            cleaned[key] = self._keyword(key, part, depth + 1)
        return cleaned

    def _keyword(self, key: str, value: Any, depth: int) -> Any:
        if key in _DATA:
            return self._data(value, depth)
        if key in _MAPS and isinstance(value, dict):
            self._count(len(value), depth)
            return {name: self.schema(part, depth + 1) for name, part in value.items()}
        return self.schema(value, depth)

    def _other(self, value: Any, depth: int) -> Any:
        """Not an object: a list of schemas, or a plain value."""
        if not isinstance(value, list):
            return value
        self._count(len(value), depth)
        return [self.schema(each, depth + 1) for each in value]

    def _data(self, value: Any, depth: int) -> Any:
        if isinstance(value, dict | list):
            self._count(len(value), depth)
            for each in value.values() if isinstance(value, dict) else value:
                self._data(each, depth + 1)
        return value

    def _count(self, parts: int, depth: int) -> None:
        self._parts += parts
        if depth > MAX_SCHEMA_DEPTH:
            raise InvalidRequest(f"{self._param} is nested more than {MAX_SCHEMA_DEPTH} deep.", param=self._param)
        if self._parts > MAX_SCHEMA_PARTS:
            raise _too_large(self._param)


def _too_large(param: str) -> InvalidRequest:
    limits = f"at most {MAX_SCHEMA_BYTES} bytes and {MAX_SCHEMA_PARTS} parts"
    return InvalidRequest(f"{param} is too large: a schema can have {limits}.", param=param)


def _stacks_quantifiers(pattern: str) -> bool:
    """One pass over the pattern."""
    at, behind = 0, False  # whether what came before is a quantifier
    while at < len(pattern):
        quantifier = _QUANTIFIER.match(pattern, at)
        if quantifier is not None:
            if behind:
                return True
            at, behind = quantifier.end(), True
            if pattern[at : at + 1] == "?":  # lazy
                at += 1
            continue
        behind = False
        if pattern[at] == "\\":
            at += 2
        elif pattern[at] == "[":
            at = _end_of_class(pattern, at)
        elif (group := _INLINE_GROUP.match(pattern, at)) is not None:
            at = group.end()
        else:
            at += 1
    return False


def _end_of_class(pattern: str, at: int) -> int:
    depth = 0
    while at < len(pattern):
        if pattern[at] == "[":
            depth += 1
            at += 1 + (pattern[at + 1 : at + 2] == "^")
            at += pattern[at : at + 1] == "]"  # a bracket that comes first is a character
            continue
        if pattern[at] == "]":
            depth -= 1
            if not depth:
                return at + 1
        at += 2 if pattern[at] == "\\" else 1
    return at
