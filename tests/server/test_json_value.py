"""Where a JSON object ends: compared with Python's own decoder."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.tools.json_value import MAX_DEPTH, JsonValue
from tests.server.splits import pieces_of

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab"\\{}[]<\n é', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('k"{', max_size=3), inner, max_size=3),
    max_leaves=20,
)


@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=4), st.text(max_size=6), st.data())
def test_it_ends_where_the_object_ends(value: dict[str, Any], behind: str, data: st.DataObject) -> None:
    text = json.dumps(value, indent=data.draw(st.sampled_from([None, 1])))
    scanner, taken = JsonValue(), ""
    for piece in pieces_of(text + behind, data):
        end = scanner.scan(piece, 0)
        taken += piece[:end]
        if scanner.ended:
            break
        assert end == len(piece)
    assert (taken, scanner.broken) == (text, False)


@pytest.mark.parametrize("depth", range(1, 12))
def test_nested_deeper_than_one_regular_expression(depth: int) -> None:
    value = '{"a":' * depth + "[[1]]" + "}" * depth
    scanner = JsonValue()
    assert scanner.scan(value + "}]", 0) == len(value)
    assert scanner.ended


@pytest.mark.parametrize("text", ['{"a": <', '{"a": [}', '{"a": 1]', "{" + "[" * (MAX_DEPTH + 1) + "1, ["])
def test_what_is_no_json(text: str) -> None:
    scanner = JsonValue()
    assert scanner.scan(text + "x", 0) <= len(text)
    assert scanner.broken
    assert not scanner.ended
