"""Text in pieces: for the tests of everything that reads text while it comes."""

from __future__ import annotations

from hypothesis import strategies as st


def pieces_of(text: str, data: st.DataObject) -> list[str]:
    """`text`, cut at places that hypothesis chooses."""
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
