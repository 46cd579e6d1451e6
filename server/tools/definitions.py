"""The tools of a chat request, checked: `tools`, `tool_choice`, `parallel_tool_calls`.

By hand and not by a schema, as messages are: an error names the one place that is wrong (`tools[3].function.name`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from server.errors import InvalidRequest, UnsupportedParameter

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 512 * 1024
MAX_SCHEMA_DEPTH = 64
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_MODES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments; empty: any object."""
    strict: bool
    definition: Mapping[str, Any]
    """As the client sent it, for the chat template."""


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """What a request says about tools. `choice` "named": the function `named` and no other."""

    tools: tuple[Tool, ...] = ()
    choice: Literal["none", "auto", "required", "named"] = "none"
    named: str | None = None
    parallel: bool = True
    """Whether there may be more than one call."""

    @property
    def is_active(self) -> bool:
        """Whether the answer may have calls."""
        return self.choice != "none"

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        return tuple(tool for tool in self.tools if self.named in (None, tool.name))

    @property
    def is_constrained(self) -> bool:
        """Whether the answer must follow a grammar: a call is demanded, or arguments that fit their schema."""
        return self.choice in ("required", "named") or (
            self.is_active and any(tool.strict for tool in self.callable_tools)
        )

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """The arguments' schemas of the functions that may be called."""
        return {tool.name: tool.parameters for tool in self.callable_tools}

    @property
    def definitions(self) -> list[Mapping[str, Any]] | None:
        """For the chat template. A model that is to call none is told of none: nothing else would keep it from it."""
        return [tool.definition for tool in self.tools] if self.is_active else None


def parse_tools(tools: Any, tool_choice: Any, parallel: bool | None) -> ToolRequest:
    """Raises InvalidRequest, and UnsupportedParameter for tools that are no functions."""
    parsed = _parse_list(tools)
    choice, named = _parse_choice(tool_choice, parsed)
    # Clients that name a function want the one call; a weak model would go on making it until it is cut off.
    return ToolRequest(parsed, choice, named, parallel is not False and choice != "named")


def _parse_list(value: Any) -> tuple[Tool, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise _invalid("tools", "must be a list of tools")
    if len(value) > MAX_TOOLS:
        raise _invalid("tools", f"must have at most {MAX_TOOLS} tools")
    tools = tuple(_parse_tool(tool, f"tools[{index}]") for index, tool in enumerate(value))
    if len({tool.name for tool in tools}) < len(tools):
        raise _invalid("tools", "must not have two functions of one name")
    # After the depth is known: this recurses.
    if len(msgspec.json.encode(value)) > MAX_TOOLS_BYTES:
        raise _invalid("tools", f"must be at most {MAX_TOOLS_BYTES} bytes of JSON")
    return tools


def _parse_tool(value: Any, where: str) -> Tool:
    if not isinstance(value, dict):
        raise _invalid(where, "must be an object")
    if value.get("type") != "function":
        if not isinstance(value.get("type"), str):
            raise _invalid(f"{where}.type", 'must be "function"')
        raise UnsupportedParameter(f"{where}.type: only functions are supported.", param=f"{where}.type")
    function, where = value.get("function"), f"{where}.function"
    if not isinstance(function, dict):
        raise _invalid(where, "must be an object")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _invalid(f"{where}.name", "must be 1 to 64 letters, digits, underscores and dashes")
    if not isinstance(function.get("description"), str | None):
        raise _invalid(f"{where}.description", "must be a string")
    if not isinstance(function.get("strict"), bool | None):
        raise _invalid(f"{where}.strict", "must be a boolean")
    parameters = _parse_parameters(function.get("parameters"), f"{where}.parameters")
    if _is_deeper_than(value, MAX_SCHEMA_DEPTH):
        raise _invalid(where, f"must be nested at most {MAX_SCHEMA_DEPTH} deep")
    return Tool(name, parameters, bool(function.get("strict")), value)


def _parse_parameters(value: Any, where: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _invalid(where, "must be a JSON schema")
    if value.get("type", "object") != "object":
        raise _invalid(f"{where}.type", 'must be "object"')
    if not isinstance(value.get("properties", {}), dict):
        raise _invalid(f"{where}.properties", "must be an object")
    return value


def _parse_choice(
    value: Any, tools: tuple[Tool, ...]
) -> tuple[Literal["none", "auto", "required", "named"], str | None]:
    if value is None:
        return ("auto" if tools else "none"), None
    if isinstance(value, dict):
        return "named", _parse_named(value, tools)
    if value not in _MODES:
        raise _invalid("tool_choice", f"must be one of {', '.join(_MODES)}, or name a function")
    if not tools:
        if value == "required":
            raise _invalid("tool_choice", "needs tools")
        return "none", None
    return value, None


def _parse_named(value: dict[str, Any], tools: tuple[Tool, ...]) -> str:
    if value.get("type") != "function":
        if isinstance(value.get("type"), str):
            raise UnsupportedParameter("tool_choice.type: only function is supported.", param="tool_choice.type")
        raise _invalid("tool_choice.type", 'must be "function"')
    function = value.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise _invalid("tool_choice.function.name", "must be a string")
    if all(tool.name != name for tool in tools):
        raise _invalid("tool_choice.function.name", "must be one of tools")
    return name


def _is_deeper_than(value: Any, limit: int) -> bool:
    """Level by level, not by recursion: a request may be nested as deep as its parser allows."""
    level = [value]
    for _ in range(limit):
        level = [
            child
            for each in level
            if isinstance(each, dict | list)
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def _invalid(where: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{where} {what}.", param=where)
