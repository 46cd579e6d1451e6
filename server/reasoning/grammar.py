"""Reasoning as a part of a grammar: it comes first and is free, and what is asked of the answer holds behind it. In
llguidance's Lark dialect. Used by `tools.grammar` for calls, and by `answer_grammar` for structured outputs
(`behind_reasoning`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from server.reasoning.styles import ReasoningStyle

TERMINALS = r"""
TEXT: /(.|\n)*/
WS: /[ \n]{0,4}/
""".strip()
"""What the rules below are made of."""


def literal(text: str) -> str:
    return json.dumps(text)


def marker(name: str, special_ids: Mapping[str, int]) -> str:
    """`special_ids`: markers that are special tokens, which are written as tokens and not as text."""
    token = special_ids.get(name)
    return literal(name) if token is None else f"<[{token}]>"


def free_until(rule: str, name: str, special_ids: Mapping[str, int]) -> str:
    """A rule for any text up to and with a marker."""
    lazy = "" if name in special_ids else "[lazy]"
    return f"{rule}{lazy}: TEXT {marker(name, special_ids)}"


def reasoning_first(style: ReasoningStyle | None, special_ids: Mapping[str, int], *, is_open: bool) -> str:
    """The beginning of a start rule. `is_open`: the prompt ends within the reasoning."""
    if style is None:
        return ""
    return "thought WS " if is_open else f"({marker(style.markers.start, special_ids)} thought WS)? "


def reasoning_rules(style: ReasoningStyle | None, special_ids: Mapping[str, int]) -> list[str]:
    return [] if style is None else [free_until("thought", style.markers.end, special_ids)]


def behind_reasoning(grammar: str, style: ReasoningStyle, special_ids: Mapping[str, int], *, is_open: bool) -> str:
    """`grammar`, which is llguidance's own (JSON or Lark), for the answer of a model that reasons before it."""
    start = f"start: {reasoning_first(style, special_ids, is_open=is_open)}@answer"
    lark = "\n".join(["%llguidance {}", start, *reasoning_rules(style, special_ids), TERMINALS])
    return json.dumps({"grammars": [{"lark_grammar": lark}, _named(grammar)]}, ensure_ascii=False)


def _named(grammar: str) -> dict[str, Any]:
    """What `server.grammar_child` makes: a schema in JSON, everything else in Lark."""
    if grammar.startswith('{"grammars":'):  # Lark's texts don't begin so
        (inner,) = json.loads(grammar)["grammars"]
        return {**inner, "name": "answer"}
    return {"name": "answer", "lark_grammar": grammar}
