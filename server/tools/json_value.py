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


_PLAIN = re.compile(_closed(6), re.DOTALL)
_STRING_REST = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)
_OPENERS = re.compile(r"[{\[]++")
_CLOSERS = re.compile(r"[}\]]++")
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
        while position < end and not (self.ended or self.broken):
            if self._in_string:
                position = self._string(text, position)
                continue
            if self._open:
                position = _matched(_PLAIN, text, position)
                if position == end:
                    break
            character = text[position]
            if character == '"':
                self._in_string = True
                position += 1
            elif character in "]}":
                position = self._close(text, position)
            elif character in "[{" and len(self._open) < MAX_DEPTH:
                # At depth 0 only the value's own brace is its first; more of them are wrong, and count all the same.
                behind = _matched(_OPENERS, text, position)
                self._open += text[position:behind][:MAX_DEPTH]
                position = behind
            else:
                self.broken = True
        return position

    def _close(self, text: str, position: int) -> int:
        run = text[position : _matched(_CLOSERS, text, position)][: len(self._open)]
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
