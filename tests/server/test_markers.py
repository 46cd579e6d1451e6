"""Markers in a stream: found wherever they are, and no more held back than must be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from server.markers import Markers

NAMES = st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=3)


@given(NAMES, st.text("ab<", max_size=12))
def test_what_is_held_back(names: list[str], text: str) -> None:
    markers = Markers(names)
    if markers.search(text, 0) is not None:
        return
    held = text[markers.hold_from(text, 0) :]
    prefixes = {name[:size] for name in names for size in range(1, len(name))}
    assert len(held) == max((len(prefix) for prefix in prefixes if text.endswith(prefix)), default=0)


@given(NAMES, st.text("ab<", max_size=12))
def test_the_first_and_longest_is_found(names: list[str], text: str) -> None:
    found = Markers(names).search(text, 0)
    places = [(text.find(name), -len(name)) for name in names if name in text]
    assert (None if found is None else (found.start(), -len(found.group()))) == min(places, default=None)


def test_no_markers() -> None:
    assert Markers(()).search("text", 0) is None
    assert Markers(()).hold_from("text", 0) == 4
