"""`tools` and `tool_choice` of a response request, as a chat request has them and as a response tells them. What is in
a function is checked by chat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from server.errors import InvalidRequest, UnsupportedParameter
from server.tools.definitions import MAX_TOOLS

_FUNCTION = ("name", "description", "parameters", "strict")
_NEUTRAL: dict[str, Callable[[Any], bool]] = {
    "allowed_callers": lambda value: value is None or value == ["direct"],
    "async": lambda value: not value,
    "defer_loading": lambda value: not value,
}
"""Members that are refused where they ask for something."""


def chat_tools(value: Any) -> list[dict[str, Any]] | None:
    """Raises InvalidRequest, and UnsupportedParameter for tools that are no functions."""
    if value is None:
        return None
    if not isinstance(value, list):
        raise _invalid("tools", "must be a list of tools")
    if len(value) > MAX_TOOLS:
        raise _invalid("tools", f"must have at most {MAX_TOOLS} tools")
    return [_chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(value)]


def _chat_tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise _invalid(where, "must be an object")
    if not isinstance(tool.get("type"), str):
        raise _invalid(f"{where}.type", "must be a string")
    if tool["type"] != "function":
        raise UnsupportedParameter(f"{where}.type: only functions are supported.", param=f"{where}.type")
    for member, is_neutral in _NEUTRAL.items():
        if not is_neutral(tool.get(member)):
            raise UnsupportedParameter(f"{where}.{member} is not supported.", param=f"{where}.{member}")
    return {"type": "function", "function": {key: tool[key] for key in _FUNCTION if tool.get(key) is not None}}


def chat_tool_choice(value: Any, tools: Sequence[dict[str, Any]] | None) -> tuple[Any, list[dict[str, Any]] | None]:
    """The choice, and those of `tools` that may be called: `allowed_tools` names some of them. Raises APIError."""
    given = None if tools is None else list(tools)
    if not isinstance(value, dict):
        return value, given
    kind = value.get("type")
    if kind == "function":
        return {"type": "function", "function": {"name": value.get("name")}}, given
    if kind != "allowed_tools":
        if not isinstance(kind, str):
            raise _invalid("tool_choice.type", "must be a string")
        raise UnsupportedParameter(
            "tool_choice.type: only function and allowed_tools are supported.", param="tool_choice.type"
        )
    if value.get("mode") not in ("auto", "required"):
        raise _invalid("tool_choice.mode", "must be auto or required")
    names = _allowed_names(value.get("tools"), {_name(tool) for tool in given or ()})
    return value["mode"], [tool for tool in given or () if _name(tool) in names]


def _allowed_names(value: Any, known: set[Any]) -> set[str]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_TOOLS:
        raise _invalid("tool_choice.tools", f"must be a list of 1 to {MAX_TOOLS} tools")
    for index, tool in enumerate(value):
        where = f"tool_choice.tools[{index}]"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise _invalid(where, 'must be an object of type "function"')
        if not isinstance(tool.get("name"), str) or tool["name"] not in known:
            raise _invalid(f"{where}.name", "must be one of tools")
    return {tool["name"] for tool in value}


def _name(tool: dict[str, Any]) -> str | None:
    name = tool["function"].get("name")
    return name if isinstance(name, str) else None


def told_tools(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """As the response tells them, once they have been checked."""
    return [{"type": "function", **_told(tool["function"])} for tool in tools or ()]


def _told(function: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": function["name"],
        "description": function.get("description"),
        "parameters": function.get("parameters", {}),
        "strict": function.get("strict", False),
    }


def told_tool_choice(value: Any, tools: Sequence[dict[str, Any]] | None) -> Any:
    """As the response tells it, once it has been checked."""
    if value is None:
        return "auto"
    if isinstance(value, str):
        return value if tools else ("none" if value == "none" else "auto")
    if value["type"] == "function":
        return {"type": "function", "name": value["name"]}
    allowed = [{"type": "function", "name": tool["name"]} for tool in value["tools"]]
    return {"type": "allowed_tools", "mode": value["mode"], "tools": allowed}


def _invalid(where: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{where} {what}.", param=where)
