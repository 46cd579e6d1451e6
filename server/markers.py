"""Literal markers in a stream of text, such as `<tool_call>` or `</think>`. Used by the tool and reasoning parsers."""

from __future__ import annotations

import re
from collections.abc import Iterable


class Markers:
    """A set of strings to look for. Searching is linear in the text; holding back looks only at its last few
    characters."""

    def __init__(self, markers: Iterable[str]) -> None:
        """`markers`: none of them empty."""
        # The longest first: of two that begin at one place, it is meant.
        self._markers = tuple(sorted(set(markers), key=lambda marker: (-len(marker), marker)))
        self._pattern = re.compile("|".join(map(re.escape, self._markers)) or r"(?!)")
        self._reach = max(map(len, self._markers), default=1) - 1

    def search(self, text: str, position: int) -> re.Match[str] | None:
        """The first one at `position` or behind it."""
        return self._pattern.search(text, position)

    def match(self, text: str, position: int) -> re.Match[str] | None:
        return self._pattern.match(text, position)

    def hold_from(self, text: str, position: int) -> int:
        """Where the part of text[position:] begins that more text may turn into a marker; len(text) if there is none.
        (`search` has found nothing.)"""
        end = len(text)
        start = first = max(position, end - self._reach)
        held = end
        for marker in self._markers:
            start = text.find(marker[0], first, held)
            while start != -1:
                if marker.startswith(text[start:]):
                    held = start
                    break
                start = text.find(marker[0], start + 1, held)
        return held

    def may_begin_at(self, text: str, position: int) -> bool:
        """Whether text[position:] is the beginning of a marker, not yet a whole one."""
        rest = len(text) - position
        return 0 < rest <= self._reach and any(
            len(marker) > rest and marker.startswith(text[position:]) for marker in self._markers
        )
