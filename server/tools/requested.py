"""A request's tools, held against what the model and this server can do, and what they make of its answer. Called by
`chat`."""

from __future__ import annotations

from typing import Any

from server.chat_parts import PartsRules
from server.errors import UnsupportedParameter
from server.schemas import ChatRequest, TokenizeRequest
from server.services import Services
from server.tools.definitions import ToolRequest, parse_tools


def requested_tools(request: ChatRequest | TokenizeRequest, services: Services) -> ToolRequest:
    """Raises InvalidRequest, and UnsupportedParameter for what this model or server does not have."""
    if not isinstance(request, ChatRequest):
        tools = parse_tools(request.tools, None, None)
        _check_template(request, tools, services)
        return tools
    tools = parse_tools(request.tools, request.tool_choice, request.parallel_tool_calls)
    if not tools.is_active:
        return tools
    _check_template(request, tools, services)
    if services.tool_style is None:
        raise UnsupportedParameter(
            "tools: how this model writes calls is not known here (the server may be started with --tool-call-parser).",
            param="tools",
        )
    return tools


def _check_template(request: ChatRequest | TokenizeRequest, tools: ToolRequest, services: Services) -> None:
    if tools.is_active and not services.chat_template.mentions("tools", request.chat_template):
        raise UnsupportedParameter("tools: this model's chat template knows no tools.", param="tools")


def parts_rules(request: ChatRequest, tools: ToolRequest, prompt: str, services: Services) -> PartsRules | None:
    """How the answer to `prompt` is taken apart; None: not at all, it is content."""
    tool_style = services.tool_style if tools.is_active else None
    reasoning = services.reasoning_style
    if tool_style is None and reasoning is None:
        return None
    markers = (() if tool_style is None else tool_style.markers) + (() if reasoning is None else reasoning.all_markers)
    special = services.tokenizer.special_ids(markers) if request.skip_special_tokens is not False else ()
    return PartsRules(
        tools=tools,
        tool_style=tool_style,
        reasoning=reasoning,
        begins_in_reasoning=reasoning is not None and reasoning.is_open(prompt, _continued(request)),
        tell_reasoning=request.include_reasoning is not False,
        special_markers=frozenset(special),
    )


def _continued(request: ChatRequest) -> str | None:
    """The beginning of the answer, if the last message is one."""
    message: Any = request.messages[-1] if request.continue_final_message else None
    content = None if message is None else message.get("content")
    return content if isinstance(content, str) else None
