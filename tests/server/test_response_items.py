"""Turns of a conversation, and the messages that they make."""

from __future__ import annotations

from typing import Any

import pytest

from server.responses.items import messages_of, turns_of_output

USER = {"role": "user", "content": "u"}
TOOL = {"role": "tool", "tool_call_id": "1", "content": "t"}


def text(value: str) -> dict[str, Any]:
    return {"role": "assistant", "content": value}


def thought(value: str) -> dict[str, Any]:
    return {"role": "assistant", "reasoning_content": value}


def calls(*names: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": list(names)}


@pytest.mark.parametrize(
    ("turns", "messages"),
    [
        ([USER, USER], [USER, USER]),
        ([USER, text("a"), text("b")], [USER, text("a"), text("b")]),
        ([thought("r"), text("a"), USER], [thought("r") | text("a"), USER]),
        ([thought("r"), text("a"), calls("f"), calls("g"), TOOL], [thought("r") | text("a") | calls("f", "g"), TOOL]),
        ([calls("f"), TOOL, calls("g"), TOOL], [calls("f"), TOOL, calls("g"), TOOL]),
        ([calls("f"), text("a")], [calls("f") | text("a")]),
        ([thought("r"), calls("f"), thought("s"), calls("g")], [thought("r\ns") | calls("f", "g")]),
        ([text("a"), thought("r"), text("b")], [text("a"), thought("r") | text("b")]),
    ],
)
def test_messages_of(turns: list[dict[str, Any]], messages: list[dict[str, Any]]) -> None:
    before = [dict(turn) for turn in turns]
    assert messages_of(turns) == messages
    assert turns == before


def test_whatever_a_model_has_said_has_turns() -> None:
    items: list[dict[str, Any]] = [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "r"}], "summary": []},
        {"type": "message", "content": []},
        {"type": "function_call", "call_id": "c", "name": "n" * 1000, "arguments": "{"},
    ]
    call = {"id": "c", "type": "function", "function": {"name": "n" * 1000, "arguments": "{"}}
    assert turns_of_output(items) == [thought("r"), text(""), {"role": "assistant", "tool_calls": [call]}]


def test_a_thousand_turns_of_one_message_are_not_copied_a_thousand_times() -> None:
    """8 MiB of reasoning, in items of 500 characters, stopped the event loop for twenty seconds."""

    class Text(str):
        __slots__ = ()

        def __radd__(self, other: object) -> str:
            raise AssertionError("what was there before is copied")

    class Calls(list[str]):
        def __iter__(self) -> Any:
            assert len(self) == 1, "what was there before is copied"
            return super().__iter__()

    turns = [thought(Text("r")) for _ in range(1000)]
    turns += [{"role": "assistant", "tool_calls": Calls(["f"])} for _ in range(1000)]
    assert messages_of(turns) == [thought("\n".join("r" * 1000)) | calls(*"f" * 1000)]
