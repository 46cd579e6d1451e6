"""Objects and lists, counted in JSON that is not parsed; the reference is Python's own parser."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server import json_nodes
from server.body import parse_large
from server.errors import InvalidRequest
from server.json_nodes import MAX_NODES, count_nodes, has_too_many_nodes

# Whatever may be taken for the end of a string, or for an object outside of one.
TEXTS = st.text(st.sampled_from('{["\\]}n,:é'), max_size=20)
VALUES = st.recursive(
    TEXTS | st.integers() | st.none(),
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(TEXTS, inside, max_size=4),
    max_leaves=20,
)


def nodes_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(nodes_of, value.values()))
    return 1 + sum(map(nodes_of, value)) if isinstance(value, list) else 0


@given(value=VALUES, piece=st.integers(1, 50), ascii_only=st.booleans())
def test_it_counts_what_a_parser_finds(value: Any, piece: int, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_nodes, "_PIECE_BYTES", piece)
        patch.setattr(json_nodes, "give_turn", lambda: None)
        assert count_nodes(text) == count_nodes(memoryview(text)) == nodes_of(value)
        for limit in (nodes_of(value) - 1, nodes_of(value)):
            assert has_too_many_nodes(text, limit) == (nodes_of(value) > limit)


@pytest.mark.parametrize("unit", [b"{},", b"[],", b'{"a":{}},'])
def test_a_body_of_nothing_but_objects(unit: bytes) -> None:
    body = b'{"prompt":[' + unit * MAX_NODES + b"1]}"
    with pytest.raises(InvalidRequest, match="objects and lists") as caught:
        parse_large(memoryview(body), 16 << 20)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_what_clients_send() -> None:
    """A file of brackets in a message, ids by the thousand, and the longest conversation that there may be."""
    code = json.dumps([{"a": [1]}] * 100_000)
    part = {"type": "text", "text": "a"}
    called = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    for body in (
        {"messages": [{"role": "user", "content": code}]},
        {"prompt": [[1, 2, 3] * 50] * 1024},
        {"messages": [{"role": "user", "content": [part]}] * 16384},
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [called]}] * 16384},
    ):
        assert parse_large(memoryview(json.dumps(body).encode())) == body
