"""Stop strings in a stream of text. One `StopScanner` a choice; fed by `choices`.

What is a hit does not depend on where tokens or chunks begin and end: the text is scanned character by character, and
the first stop string to be *completed* ends it (the longest one, where several end on the same character). Text that
may still turn out to be the beginning of a stop string is held back.

Every character costs one step of a Knuth-Morris-Pratt automaton for each stop string (at most four), so the cost is
linear in the text whatever the strings look like.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """`push` text, send what it returns, and at the end `flush` what is held back (unless `hit` is set)."""

    __slots__ = ("_failures", "_held", "_include", "_states", "_stops", "hit")

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """`stops`: none of them empty. `include_stop`: the text ends behind the stop string, not before it."""
        self._stops = tuple(stops)
        self._include = include_stop
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        """How many characters of each stop string the text seen so far ends with."""
        self._held = ""
        self.hit: str | None = None
        """The stop string that was found."""

    def push(self, text: str) -> str:
        """The text that may be sent now. After a hit: nothing."""
        if self.hit is not None:
            return ""
        if not self._stops:
            return text
        for position, character in enumerate(text):
            longest = self._advance(character)
            if longest:
                self.hit = text_end = self._stops[longest - 1]
                seen = self._held + text[: position + 1]
                self._held = ""
                return seen if self._include else seen[: len(seen) - len(text_end)]
        seen = self._held + text
        keep = len(seen) - max(self._states)
        self._held = seen[keep:]
        return seen[:keep]

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held

    def _advance(self, character: str) -> int:
        """One step of every automaton. 1 + the index of the longest stop string that is complete now, or 0."""
        found = 0
        for index, stop in enumerate(self._stops):
            failures = self._failures[index]
            state = self._states[index]
            while state and stop[state] != character:
                state = failures[state - 1]
            if stop[state] == character:
                state += 1
            self._states[index] = state
            if state == len(stop) and (not found or len(stop) > len(self._stops[found - 1])):
                found = index + 1
        return found


def _failure_table(stop: str) -> list[int]:
    """table[i]: the length of the longest proper prefix of `stop` that is also a suffix of stop[: i + 1]."""
    table = [0] * len(stop)
    state = 0
    for position in range(1, len(stop)):
        while state and stop[position] != stop[state]:
            state = table[state - 1]
        if stop[position] == stop[state]:
            state += 1
        table[position] = state
    return table
