"""Messages: what is accepted, and what is said about the rest."""

from __future__ import annotations

from typing import Any

import pytest

from server.conversation import MAX_CALLS, MAX_MESSAGES, parse_messages
from server.errors import InvalidRequest, UnsupportedParameter
from server.json_nodes import MAX_NODES


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


CALL: dict[str, Any] = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def answer(*calls: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **more}


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


def test_replayed_calls_and_their_results() -> None:
    conversation = [answer(CALL, content="Well."), {"role": "tool", "tool_call_id": "call_1", "content": "5"}]
    first, second = parse_messages(conversation)
    call = {**CALL, "function": {"name": "f", "arguments": {"a": 1}}}
    assert first == {"role": "assistant", "content": "Well.", "tool_calls": [call]}
    assert first["tool_calls"][0]["function"]["arguments"].text == '{"a": 1}'
    assert second == {"role": "tool", "tool_call_id": "call_1", "content": "5"}


@pytest.mark.parametrize(
    ("text", "arguments"),
    [("", {}), (" ", {}), ("{}", {}), ('{"a": ', '{"a": '), ("[1]", "[1]"), ("5", "5"), ("[" * 9999, "[" * 9999)],
    ids=lambda value: repr(value)[:20],
)
def test_arguments_that_are_no_object_stay_text(text: str, arguments: Any) -> None:
    (message,) = parse_messages([answer({**CALL, "function": {"name": "f", "arguments": text}})])
    assert message["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_replayed_reasoning(key: str) -> None:
    (message,) = parse_messages([{"role": "assistant", "content": "x", key: "because"}])
    assert message == {"role": "assistant", "content": "x", "reasoning_content": "because"}


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
        ([{"role": "tool", "content": "5"}], "messages[0].tool_call_id"),
        ([{"role": "tool", "content": "5", "tool_call_id": "x" * 257}], "messages[0].tool_call_id"),
        ([{"role": "tool", "content": None, "tool_call_id": "x"}], "messages[0].content"),
        ([answer(CALL, reasoning=5)], "messages[0].reasoning"),
        ([{"role": "assistant", "content": "", "tool_calls": "x"}], "messages[0].tool_calls"),
        ([answer(*[CALL] * (MAX_CALLS + 1))], "messages[0].tool_calls"),
        ([answer("x")], "messages[0].tool_calls[0]"),
        ([answer(CALL, {**CALL, "id": ""})], "messages[0].tool_calls[1].id"),
        ([answer({**CALL, "type": 5})], "messages[0].tool_calls[0].type"),
        ([answer({**CALL, "function": None})], "messages[0].tool_calls[0].function"),
        ([answer({**CALL, "function": {"name": "x" * 65}})], "messages[0].tool_calls[0].function.name"),
        (
            [answer({**CALL, "function": {"name": "f", "arguments": {}}})],
            "messages[0].tool_calls[0].function.arguments",
        ),
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
        ({"role": "function", "content": "5"}, "messages[0].role"),
        (
            {"role": "assistant", "content": None, "tool_calls": [{"id": "x", "type": "custom"}]},
            "messages[0].tool_calls[0].type",
        ),
        ({"role": "assistant", "content": None, "function_call": {"name": "f"}}, "messages[0].function_call"),
        (user([{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content[0].type"),
        (user([{"type": "input_audio"}]), "messages[0].content[0].type"),
    ],
)
def test_what_is_not_supported(message: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        parse_messages([message])
    assert (caught.value.param, caught.value.code) == (param, "unsupported_parameter")


def test_arguments_of_nothing_but_objects() -> None:
    """They are parsed as they are read, and are text to whatever looks at the body."""
    half = {**CALL, "function": {"name": "f", "arguments": '{"a": [' + "[]," * (MAX_NODES // 2) + "1]}"}}
    assert parse_messages([user("x"), answer(half)])
    with pytest.raises(InvalidRequest, match="objects and lists") as caught:
        parse_messages([user("x"), answer(half), answer(CALL, half)])
    assert caught.value.param == "messages"
