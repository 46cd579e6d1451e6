"""Messages: what is accepted, and what is said about the rest."""

from __future__ import annotations

from typing import Any

import pytest

from server.conversation import MAX_MESSAGES, parse_messages
from server.errors import InvalidRequest, UnsupportedParameter


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_strings_and_parts() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert parse_messages([user("hi"), user(parts)]) == [user("hi"), user("one\ntwo")]


def test_developer_is_system() -> None:
    assert parse_messages([{"role": "developer", "content": "x"}])[0]["role"] == "system"


def test_developer_stays_where_the_template_knows_it() -> None:
    messages = [{"role": role, "content": role} for role in ("system", "developer", "user")]
    roles = [message["role"] for message in parse_messages(messages, keep_developer=True)]
    assert roles == ["system", "developer", "user"]


def test_replayed_answers() -> None:
    replayed = [
        {"role": "assistant", "content": None, "refusal": "no", "tool_calls": [], "audio": None},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "never"}], "reasoning_content": "x"},
        {"role": "assistant", "content": None},
    ]
    assert [message["content"] for message in parse_messages(replayed)] == ["no", "never", ""]


def test_names_are_kept() -> None:
    assert parse_messages([{**user("x"), "name": "Ada"}]) == [{**user("x"), "name": "Ada"}]


@pytest.mark.parametrize(
    ("value", "param"),
    [
        (None, "messages"),
        ("hi", "messages"),
        ({}, "messages"),
        ([], "messages"),
        ([None], "messages[0]"),
        ([user("x"), "y"], "messages[1]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "root", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([user(None)], "messages[0].content"),
        ([user(5)], "messages[0].content"),
        ([user([])], "messages[0].content"),
        ([user(["x"])], "messages[0].content[0]"),
        ([user([{"text": "x"}])], "messages[0].content[0].type"),
        ([user([{"type": "text"}])], "messages[0].content[0].text"),
        ([user([{"type": "text", "text": 5}])], "messages[0].content[0].text"),
        ([{**user("x"), "name": 5}], "messages[0].name"),
        ([user("x")] * (MAX_MESSAGES + 1), "messages"),
    ],
)
def test_wrong_ones(value: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_messages(value)
    assert caught.value.param == param
    assert caught.value.code == "invalid_value"
    assert caught.value.message.startswith(param)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "5", "tool_call_id": "x"}, "messages[0].role"),
        ({"role": "function", "content": "5"}, "messages[0].role"),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}, "messages[0].tool_calls"),
        (user([{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content[0].type"),
        (user([{"type": "input_audio"}]), "messages[0].content[0].type"),
    ],
)
def test_what_would_need_tools_or_media(message: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        parse_messages([message])
    assert (caught.value.param, caught.value.code) == (param, "unsupported_parameter")
