"""Stop strings: the streamed text is what cutting the whole text would give, wherever it was split."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from server.stops import StopScanner

LETTERS = st.text("ab ", max_size=12)


def stream(pieces: Sequence[str], stops: Sequence[str], *, include_stop: bool = False) -> tuple[list[str], str | None]:
    scanner = StopScanner(stops, include_stop=include_stop)
    out = []
    for piece in pieces:
        out.append(scanner.push(piece))
        if scanner.hit is not None:
            return out, scanner.hit
    return [*out, scanner.flush()], None


def reference(text: str, stops: Sequence[str], include_stop: bool) -> tuple[str, str | None]:
    """The stop string that is complete first; of several that are complete at one place, the longest."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[:end] if include_stop else text[: end - len(stop)], stop


@given(
    st.lists(LETTERS, max_size=8),
    st.lists(st.text("ab ", min_size=1, max_size=6), max_size=4),
    st.booleans(),
)
@example(["A", "DE", "F", "G", "HI", "J!"], ["DEFGHIJ"], False)
@example(["aab"], ["aaab", "ab"], False)
@example(["aaa", "ab"], ["aaab", "ab"], True)
@example(["abab", "abc"], ["ababc"], False)
@example(["xab"], ["b", "ab"], False)
def test_a_stream_is_the_whole_text_cut(pieces: list[str], stops: list[str], include_stop: bool) -> None:
    out, hit = stream(pieces, stops, include_stop=include_stop)
    assert ("".join(out), hit) == reference("".join(pieces), stops, include_stop)


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4))
def test_no_more_is_held_back_than_must_be(text: str, stops: list[str]) -> None:
    scanner = StopScanner(stops)
    sent = ""
    for length, character in enumerate(text, 1):
        sent += scanner.push(character)
        if scanner.hit is not None:
            return
        held = text[len(sent) : length]
        longest = max(
            (size for stop in stops for size in range(len(stop)) if text[:length].endswith(stop[:size])), default=0
        )
        assert len(held) == longest


@pytest.mark.parametrize(("include_stop", "text"), [(False, "one "), (True, "one two")])
def test_the_rest_of_the_piece_is_dropped(include_stop: bool, text: str) -> None:
    scanner = StopScanner(["two"], include_stop=include_stop)
    assert scanner.push("one two three") == text
    assert scanner.push("four") == ""
    assert scanner.flush() == ""


def test_without_stop_strings_nothing_waits() -> None:
    assert StopScanner([]).push("text") == "text"


def test_the_cost_is_linear() -> None:
    # A stop string that almost matches everywhere: comparing suffixes at every character would take minutes.
    scanner = StopScanner(["a" * 1000 + "b"] * 4)
    started = time.process_time()
    for _ in range(200):
        scanner.push("a" * 999 + "c")
    assert time.process_time() - started < 5
