"""From a request's tools to the grammar that its answer must follow, checked. Called by `answer_grammar`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from server.chat_parts import PartsRules
from server.errors import InvalidRequest
from server.tokenizer import Tokenizer
from server.tools.grammar import WITH_SCHEMAS, CallGrammar

CheckSchema = Callable[[Any, str], str]
"""(a JSON schema, the field that it came in) to the schema as JSON text. Raises InvalidRequest."""
CheckGrammar = Callable[[str, str], Awaitable[str]]
"""(a grammar, the field that it came in) to the grammar, if it can be followed. Raises InvalidRequest."""

_ANY_OBJECT: dict[str, Any] = {"type": "object"}


async def compile_calls(
    rules: PartsRules, tokenizer: Tokenizer, check_schema: CheckSchema, check_grammar: CheckGrammar
) -> str:
    """`SamplingParams.grammar`; empty where the tools ask for none. A `strict` function's schema is followed or
    refused; any other's is followed where a call is demanded and the schema can be. Raises InvalidRequest."""
    style = rules.tool_style
    if style is None or not rules.tools.is_constrained:
        return ""
    markers = (*style.markers, *(() if rules.reasoning is None else rules.reasoning.all_markers))
    ids = tokenizer.special_ids(markers)
    grammar = CallGrammar(style, ids, rules.reasoning, rules.begins_in_reasoning)
    strict, others = await asyncio.to_thread(_schemas, rules, check_schema)
    if others:
        with suppress(InvalidRequest):
            return await check_grammar(grammar.compiled(rules.tools, {**strict, **others}), "tools")
    return await check_grammar(grammar.compiled(rules.tools, strict), "tools")


def _schemas(rules: PartsRules, check_schema: CheckSchema) -> tuple[Mapping[str, str], dict[str, str]]:
    """Those that must be followed and those that may be, by function. Schemas have thousands of parts: in a thread."""
    strict: dict[str, str] = {}
    others: dict[str, str] = {}
    tools, style = rules.tools, rules.tool_style
    follows = style is not None and style.name in WITH_SCHEMAS and tools.choice != "auto"
    for index, tool in enumerate(tools.tools):
        if tool.name not in tools.schemas:
            continue
        where = f"tools[{index}].function.parameters"
        if tool.strict:
            strict[tool.name] = check_schema({**_ANY_OBJECT, **tool.parameters}, where)
        elif follows and tool.parameters:
            with suppress(InvalidRequest):
                others[tool.name] = check_schema({**_ANY_OBJECT, **tool.parameters}, where)
    return strict, others
