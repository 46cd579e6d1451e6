"""Reasoning and answer, told apart however the text is split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.reasoning.styles import REASONING_STYLES, load_reasoning_style, reasoning_style_of
from server.reasoning.think import ThinkMarkers, ThinkParser
from tests.server.splits import pieces_of

MARKERS = ThinkMarkers("<think>", "</think>")


def parse(pieces: list[str], *, is_open: bool) -> tuple[str, str, int | None]:
    """(reasoning, content, where the reasoning ends)"""
    parser = ThinkParser(MARKERS, is_open=is_open)
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.flush()
    joined = {kind: "".join(text for each, text in parts if each == kind) for kind in ("reasoning", "content")}
    return joined["reasoning"], joined["content"], parser.end


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize(
    ("text", "reasoning", "content", "end"),
    [
        ("<think>\nso\nit is\n</think>\n\nParis", "so\nit is", "Paris", 25),
        ("\n<think></think>Paris", "", "Paris", 16),
        ("<think>cut of", "cut of", "", None),
        ("<think>cut </thi", "cut </thi", "", None),
        ("<think>a</think>b</think>c", "a", "b</think>c", 16),
        ("<think>a < b </ c</think> ", "a < b </ c", "", 25),
    ],
)
def test_a_marked_beginning(text: str, reasoning: str, content: str, end: int | None, is_open: bool) -> None:
    assert parse([text], is_open=is_open) == parse(list(text), is_open=is_open) == (reasoning, content, end)


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("so it is\n</think>\nParis", True, ("so it is", "Paris", 17)),
        ("cut off \n", True, ("cut off", "", None)),
        ("</think>Paris", True, ("", "Paris", 8)),
        ("", True, ("", "", None)),
        ("Paris", False, ("", "Paris", 0)),
        (" \nParis <think>x</think>", False, ("", " \nParis <think>x</think>", 0)),
        ("<thin", False, ("", "<thin", 0)),
        (" ", False, ("", " ", 0)),
    ],
)
def test_the_prompt_tells(text: str, is_open: bool, expected: tuple[str, str, int | None]) -> None:
    assert parse([text], is_open=is_open) == parse(list(text), is_open=is_open) == expected


@given(st.lists(st.sampled_from(["<think>", "</think>", "<", "think", " ", "\n", "a"]), max_size=12), st.data())
def test_splits_make_no_difference(words: list[str], data: st.DataObject) -> None:
    text, is_open = "".join(words), data.draw(st.booleans())
    reasoning, content, end = parse(pieces_of(text, data), is_open=is_open)
    assert (reasoning, content, end) == parse([text], is_open=is_open)
    # Nothing is lost but white space and markers.
    rest = text.lstrip().removeprefix("<think>") if end != 0 else text
    rest = rest.replace("</think>", "", 1) if end else rest
    assert "".join((reasoning + content).split()) == "".join(rest.split())


def test_what_the_prompt_ends_with() -> None:
    qwen, deepseek = REASONING_STYLES["qwen3"], REASONING_STYLES["deepseek_r1"]
    assert qwen.is_open("<turn>assistant\n<think>\n")
    assert not qwen.is_open("<turn>assistant\n<think>\n\n</think>\n\n")
    assert not qwen.is_open("<think> said the user\n<turn>assistant\n")
    assert deepseek.is_open("<turn>assistant\n")
    assert not deepseek.is_open("<turn>assistant\n<think>\n\n</think>\n\n")
    assert qwen.is_open("<turn>assistant\n<think>\nWell", continued="<think>\nWell")
    assert not deepseek.is_open("x", continued="<think>\nWell</think>\nSo")


def test_styles_of_templates() -> None:
    assert reasoning_style_of("{% if '</think>' in content %}") is REASONING_STYLES["qwen3"]
    assert reasoning_style_of("[THINK]{{ x }}[/THINK]") is REASONING_STYLES["mistral"]
    assert reasoning_style_of("{{ messages }}") is None
    assert load_reasoning_style("none", "</think>") is None
    assert load_reasoning_style("deepseek_r1", "") is REASONING_STYLES["deepseek_r1"]
    with pytest.raises(ValueError, match="--reasoning-parser"):
        load_reasoning_style("x", "")
