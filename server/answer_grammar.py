"""What the answer to a chat request must match: the form that its client asks for, or that of calls, each behind the
model's reasoning. Called by `chat` and `render`."""

from __future__ import annotations

from server.chat_parts import PartsRules
from server.errors import UnsupportedParameter
from server.json_schema import parse_schema
from server.reasoning.grammar import behind_reasoning
from server.services import Services
from server.structured_outputs import Constraint
from server.tools.compile import compile_calls


async def answer_grammar(constraint: Constraint | None, rules: PartsRules | None, services: Services) -> str:
    """`SamplingParams.grammar`; empty where nothing is asked for. Raises APIError."""
    if rules is None:
        return await services.grammars.compile(constraint)
    if not rules.tools.is_active:
        return await _behind_reasoning(constraint, rules, services)
    if constraint is not None:
        # The form would hold for the whole answer, and no call could ever be made.
        where = constraint.param
        raise UnsupportedParameter(
            f"{where} is not supported together with tools (or set tool_choice: none).", param=where
        )
    return await compile_calls(rules, services.tokenizer, parse_schema, services.grammars.check)


async def _behind_reasoning(constraint: Constraint | None, rules: PartsRules, services: Services) -> str:
    grammar, style = await services.grammars.compile(constraint), rules.reasoning
    if constraint is None or style is None:
        return grammar
    special = services.tokenizer.special_ids(style.all_markers)
    whole = behind_reasoning(grammar, style, special, is_open=rules.begins_in_reasoning)
    return await services.grammars.check(whole, constraint.param)
