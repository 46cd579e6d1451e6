"""Where a JSON object ends, in text that comes in pieces. Used by the parsers of calls that are written as JSON.

Strings and brackets are followed, nothing else: whether the value is valid is for whoever reads it to say. Nearly all
of a text is passed over by one regular expression without backtracking; only what is nested deeper than that knows
costs a step of Python.
"""

from __future__ import annotations

import re

_STRING = r'"(?:[^"\\]++|\\.)*+"'


def _closed(levels: int) -> str:
    """Anything whose brackets are all closed again, nested up to `levels` deep."""
    if not levels:
        return rf"(?:[^\"{{}}\[\]<]++|{_STRING})*+"
    inner = _closed(levels - 1)
    return rf"(?:[^\"{{}}\[\]<]++|{_STRING}|\[{inner}\]|\{{{inner}\}})*+"


_PLAIN = _closed(6)
_STEP = re.compile(rf"{_PLAIN}([{{\[]*+){_PLAIN}([}}\]]*+)", re.DOTALL)
_STRING_REST = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)
_CLOSER_OF = str.maketrans("{[", "}]")
MAX_DEPTH = 128


class JsonValue:
    """One object, from its opening brace on. `open_brackets`: those before the first `scan`."""

    __slots__ = ("_escaped", "_in_string", "_open", "broken", "ended")

    def __init__(self, open_brackets: str = "") -> None:
        self._open = open_brackets
        self._in_string = False
        self._escaped = False
        """The text so far ends in a backslash."""
        self.ended = False
        self.broken = False
        """No JSON: a wrong bracket, too many of them, or a `<` outside of strings, which may begin a marker."""

    def scan(self, text: str, position: int) -> int:
        """The end of what belongs to the value: its own end, where it is `broken`, or the end of the text."""
        end = len(text)
        if not self._open and position < end:
            self._open = text[position]
            position += 1
        while position < end and not (self.ended or self.broken):
            position = self._string(text, position) if self._in_string else self._step(text, position)
        return position

    def _step(self, text: str, position: int) -> int:
        found = _STEP.match(text, position)
        assert found is not None  # noqa: S101 - it matches everywhere
        openers, closers = found.groups()
        self._open += openers[: MAX_DEPTH + 1]
        if len(self._open) > MAX_DEPTH:
            self.broken = True
            return found.end(1)
        if closers:
            return self._close(closers, found.start(2))
        position = found.end()
        if position < len(text):
            self._in_string = text[position] == '"'
            self.broken = not self._in_string and text[position] not in "{["
            position += self._in_string
        return position

    def _close(self, closers: str, position: int) -> int:
        """`closers`: all the closing brackets at `position`, which may be more than are open."""
        run = closers[: len(self._open)]
        left = len(self._open) - len(run)
        if self._open[left:].translate(_CLOSER_OF)[::-1] != run:
            self.broken = True
            return position
        self._open = self._open[:left]
        self.ended = not left
        return position + len(run)

    def _string(self, text: str, position: int) -> int:
        """Behind the string's closing quote, or the end of the text."""
        if self._escaped:
            self._escaped = False
            position += 1
        position = _matched(_STRING_REST, text, position)
        if position < len(text):
            self._in_string = text[position] != '"'
            self._escaped = self._in_string  # a backslash at the very end
            position += 1
        return position


def _matched(pattern: re.Pattern[str], text: str, position: int) -> int:
    """The end of the match; `position` where there is none."""
    found = pattern.match(text, position)
    return position if found is None else found.end()
