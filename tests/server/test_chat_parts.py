"""One choice's text as reasoning, content and calls: what belongs to which, to the character."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.chat_parts import Arguments, ChatParts, Content, PartsRules, Reasoning, ToolCall
from server.reasoning.styles import REASONING_STYLES
from server.tools.definitions import parse_tools
from server.tools.styles import TOOL_STYLES
from tests.server.splits import pieces_of

TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def rules(*, parallel: bool = True, **options: Any) -> PartsRules:
    tools = parse_tools(TOOLS, None, parallel)
    return PartsRules(tools, TOOL_STYLES["hermes"], REASONING_STYLES["qwen3"], **options)


def parts_of(pieces: list[str], given: PartsRules) -> tuple[str, str, list[str]]:
    """(reasoning, content, each call's arguments)"""
    made = ChatParts(given)
    reasoning = content = ""
    calls: list[str] = []
    for part in [part for piece in pieces for part in made.push(piece)] + made.flush():
        match part:
            case Reasoning(text):
                reasoning += text
            case Content(text):
                content += text
            case ToolCall(index, call_id, name):
                assert (index, name) == (len(calls), "f")
                assert call_id
                calls.append("")
            case Arguments(index, fragment):
                assert index == len(calls) - 1
                calls[index] += fragment
    assert made.num_calls == len(calls)
    return reasoning, content, calls


@pytest.mark.parametrize(
    ("text", "content", "num_calls"),
    [
        ("  a \n", "  a \n", 0),
        (" \n", " \n", 0),
        (f" \n{CALL}", "", 1),
        (f"{CALL} \n", "", 1),
        (f"{CALL} \n{CALL}\n", "", 2),
        (f" a \n\n{CALL}", " a", 1),
        (f"{CALL}\n b \n", "b", 1),
        (f"a {CALL} b  c {CALL} d ", "ab  cd", 2),
        (f"a\n<tool_call>\nb {CALL}", "a\n<tool_call>\nb", 1),
    ],
)
def test_white_space_next_to_a_call_is_nothing(text: str, content: str, num_calls: int) -> None:
    for pieces in ([text], list(text)):
        assert parts_of(pieces, rules()) == ("", content, ['{"a": 1}'] * num_calls)


def test_calls_within_the_reasoning_are_thoughts() -> None:
    text = f"<think>{CALL}</think>{CALL}"
    assert parts_of([text], rules()) == (CALL, "", ['{"a": 1}'])
    assert parts_of([text], rules(tell_reasoning=False)) == ("", "", ['{"a": 1}'])


def test_one_call_at_most() -> None:
    assert parts_of([f"{CALL}{CALL} a"], rules(parallel=False)) == ("", "a", ['{"a": 1}'])


def test_without_tools_calls_are_content() -> None:
    given = PartsRules(reasoning=REASONING_STYLES["qwen3"], begins_in_reasoning=True)
    assert parts_of([f"so\n</think>\n {CALL} \n"], given) == ("so", f"{CALL} \n", [])


WORDS = ["<think>", "</think>", CALL, "<tool_call>", "</tool_call>", '{"name": "f", ', "}", "a", " ", "\n", "<"]


@given(st.lists(st.sampled_from(WORDS), max_size=10).map("".join), st.booleans(), st.booleans(), st.data())
def test_splits_make_no_difference(text: str, is_open: bool, parallel: bool, data: st.DataObject) -> None:
    special = frozenset(data.draw(st.sets(st.sampled_from(["<tool_call>", "</tool_call>", "</think>"]))))
    given = rules(parallel=parallel, begins_in_reasoning=is_open, special_markers=special)
    whole = parts_of([text], given)
    assert parts_of(pieces_of(text, data), given) == whole
    assert not any(marker in whole[1] for marker in special)
