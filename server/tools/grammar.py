"""Tools as a constraint: a grammar whose texts are what the parser of the model's style reads as the calls that a
request wants. In llguidance's Lark dialect; what it means is compiled and followed elsewhere.

`required` and `named` begin with a call. `auto` is free text until a call begins; such a grammar only makes sense where
a tool is `strict`. Reasoning, where the model does any, comes first and is free.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from server.errors import UnsupportedParameter
from server.reasoning.grammar import TERMINALS, free_until, literal, marker, reasoning_first, reasoning_rules
from server.reasoning.styles import ReasoningStyle
from server.tools import hermes, llama3, mistral, qwen3_coder
from server.tools.definitions import Tool, ToolRequest
from server.tools.styles import ToolStyle

MAX_CALLS = 32
"""That an answer may have, where any are demanded: a small model would repeat itself until `max_tokens`."""
_MORE = f"{{0,{MAX_CALLS - 1}}}"
"""Behind the first."""
_ANY_OBJECT = '{"type": "object"}'
_PYTHON = r"""
python: PYTHON_WORD | PYTHON_STRING | "[" python_items? "]" | "{" (python_pair ("," SPACE? python_pair)*)? "}"
python_items: python ("," SPACE? python)*
python_pair: PYTHON_STRING ":" SPACE? python
PYTHON_WORD: "True" | "False" | "None" | /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/
PYTHON_STRING: /"([^"\\\x00-\x1f]|\\[nrtbf"\\])*"/ | /'([^'\\\x00-\x1f]|\\[nrtbf'\\])*'/
SPACE: " "
"""


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """What a grammar is made of, besides the request's tools."""

    style: ToolStyle
    special_ids: Mapping[str, int]
    """Markers that are special tokens, which are written as tokens and not as text."""
    reasoning: ReasoningStyle | None = None
    begins_in_reasoning: bool = False

    def lark(self, tools: ToolRequest, schemas: Mapping[str, str]) -> str:
        """The grammar. `schemas`: the JSON schema of each function's arguments, as checked JSON text; functions that
        have none there take any object. Raises UnsupportedParameter for a style in which schemas cannot be followed."""
        if schemas and self.style.name not in WITH_SCHEMAS:
            raise UnsupportedParameter("tools: this model's calls cannot be held to a schema.", param="tools")
        wanted = tools.callable_tools
        calls = _STYLES[self.style.name](self, wanted, schemas, tools.parallel)
        first = reasoning_first(self.reasoning, self.special_ids, is_open=self.begins_in_reasoning)
        start = f"start: {first}{calls.free if tools.choice == 'auto' else calls.forced}"
        thought = reasoning_rules(self.reasoning, self.special_ids)
        return "\n".join(["%llguidance {}", start, *calls.rules, *thought, TERMINALS])

    def compiled(self, tools: ToolRequest, schemas: Mapping[str, str]) -> str:
        """The grammar in llguidance's JSON form, for `SamplingParams.grammar`."""
        return json.dumps({"grammars": [{"lark_grammar": self.lark(tools, schemas)}]}, ensure_ascii=False)

    def marker(self, name: str) -> str:
        return marker(name, self.special_ids)

    def free_until(self, rule: str, name: str) -> str:
        return free_until(rule, name, self.special_ids)


@dataclass(frozen=True, slots=True)
class _Calls:
    """How a style writes calls: the start rule's right side, with calls forced and free, and further rules."""

    forced: str
    free: str
    rules: list[str]


def _hermes(grammar: CallGrammar, tools: Sequence[Tool], schemas: Mapping[str, str], parallel: bool) -> _Calls:
    end = grammar.marker(hermes.END)
    block = f"{grammar.marker(hermes.START)} WS call WS {end}"
    more = f"(WS {block}){_MORE}" if parallel else ""
    return _Calls(
        forced=f"{block} {more}",
        free=f"(before WS call WS {end}){'*' if parallel else '?'} TEXT",
        rules=[
            grammar.free_until("before", hermes.START),
            *_json_calls(tools, schemas, "arguments"),
        ],
    )


def _llama3(grammar: CallGrammar, tools: Sequence[Tool], schemas: Mapping[str, str], parallel: bool) -> _Calls:
    calls = f'(call ("; " call){_MORE})' if parallel else "call"
    marked = f"{grammar.marker(llama3.START)}? {calls}"
    return _Calls(forced=marked, free=f"({marked} | NO_CALL)?", rules=[
        # An answer that begins with a brace is a call.
        r"NO_CALL: /[^{\s](.|\n)*/",
        *_json_calls(tools, schemas, "parameters"),
    ])  # fmt: skip


def _mistral(grammar: CallGrammar, tools: Sequence[Tool], schemas: Mapping[str, str], parallel: bool) -> _Calls:
    start = grammar.marker(mistral.START)
    named = mistral.ARGS in grammar.special_ids
    if named:
        calls = [f"{literal(tool.name)} {grammar.marker(mistral.ARGS)} args_{i}" for i, tool in enumerate(tools)]
        rules = [f"call: {' | '.join(calls)}", *_arguments(tools, schemas)]
        block, more = "call", f"({start} call){_MORE}" if parallel else ""
    else:
        rules = _json_calls(tools, schemas, "arguments")
        block, more = (f'"[" call (", " call){_MORE} "]"' if parallel else '"[" call "]"'), ""
    return _Calls(
        forced=f"{start} {block} {more}",
        free=f"(before {block}){'*' if parallel and named else '?'} TEXT",
        rules=[grammar.free_until("before", mistral.START), *rules],
    )


def _pythonic(grammar: CallGrammar, tools: Sequence[Tool], schemas: Mapping[str, str], parallel: bool) -> _Calls:
    rules = []
    for index, tool in enumerate(tools):
        names = sorted(name for name in tool.parameters.get("properties", {}) if name.isascii() and name.isidentifier())
        argument = f'({" | ".join(map(literal, names))}) "=" python' if names else ""
        arguments = f'({argument} (", " {argument})*)?' if names else ""
        rules.append(f'call_{index}: {literal(tool.name + "(")} {arguments} ")"')
    rules.append(f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}")
    calls = f'"[" call (", " call){_MORE} "]"' if parallel else '"[" call "]"'
    return _Calls(
        forced=calls, free=f"({calls} | NO_CALL)?", rules=[r"NO_CALL: /[^\[\s](.|\n)*/", *rules, _PYTHON.strip()]
    )


def _qwen3_coder(grammar: CallGrammar, tools: Sequence[Tool], schemas: Mapping[str, str], parallel: bool) -> _Calls:
    end = grammar.marker(qwen3_coder.END)
    block = f"{grammar.marker(qwen3_coder.START)} WS call WS {end}"
    rules = [grammar.free_until("before", qwen3_coder.START), 'value[lazy]: TEXT "</parameter>"']
    for index, tool in enumerate(tools):
        names = sorted(name for name in tool.parameters.get("properties", {}) if re.fullmatch(r"[^<>\n]{1,200}", name))
        tags = " | ".join(literal(f"<parameter={name}>") for name in names)
        arguments = f"(({tags}) value WS)*" if names else ""
        rules.append(f'call_{index}: {literal(f"<function={tool.name}>")} WS {arguments} "</function>"')
    rules.append(f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}")
    more = f"(WS {block}){_MORE}" if parallel else ""
    return _Calls(f"{block} {more}", f"(before WS call WS {end}){'*' if parallel else '?'} TEXT", rules)


_STYLES = {
    "hermes": _hermes,
    "llama3_json": _llama3,
    "mistral": _mistral,
    "pythonic": _pythonic,
    "qwen3_coder": _qwen3_coder,
}
WITH_SCHEMAS = frozenset({"hermes", "llama3_json", "mistral"})
"""Styles whose arguments are JSON."""


def _json_calls(tools: Sequence[Tool], schemas: Mapping[str, str], key: str) -> list[str]:
    """A rule `call` for `{"name": …, key: …}`."""
    heads = [literal('{"name": "' + tool.name + f'", "{key}": ') for tool in tools]
    calls = [f'{head} args_{index} "}}"' for index, head in enumerate(heads)]
    return [f"call: {' | '.join(calls)}", *_arguments(tools, schemas)]


def _arguments(tools: Sequence[Tool], schemas: Mapping[str, str]) -> list[str]:
    return [
        f"args_{index}: %json {_with_whitespace(schemas.get(tool.name, _ANY_OBJECT))}"
        for index, tool in enumerate(tools)
    ]


def _with_whitespace(schema: str) -> str:
    """`schema`, with as much between its tokens as models write, and no more: nothing else would end it."""
    inner = schema[1:].lstrip()
    return '{"x-guidance": {"whitespace_pattern": "[ \\\\n]{1,40}"}' + ("" if inner == "}" else ", ") + inner
