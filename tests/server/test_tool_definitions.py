"""A request's tools: what is accepted, and what is said about the rest."""

from __future__ import annotations

from typing import Any

import pytest

from server.errors import InvalidRequest, UnsupportedParameter
from server.tools.definitions import MAX_SCHEMA_DEPTH, MAX_TOOLS, MAX_TOOLS_BYTES, parse_tools


def tool(name: Any = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return {"type": "object", "properties": {"a": schema}}


NAMED = {"type": "function", "function": {"name": "f"}}


def test_tools() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}}
    given = [tool("f", description="d", parameters=parameters, strict=True), tool("g-2_X")]
    request = parse_tools(given, None, None)
    assert [(each.name, each.parameters, each.strict) for each in request.tools] == [
        ("f", parameters, True),
        ("g-2_X", {}, False),
    ]
    assert (request.choice, request.parallel, request.definitions) == ("auto", True, given)
    assert request.schemas == {"f": parameters, "g-2_X": {}}


@pytest.mark.parametrize(
    ("tools", "choice", "expected"),
    [
        (None, None, "none"),
        ([], None, "none"),
        ([], "auto", "none"),
        (None, "none", "none"),
        ([tool()], None, "auto"),
        ([tool()], "auto", "auto"),
        ([tool()], "none", "none"),
        ([tool()], "required", "required"),
        ([tool("g"), tool()], NAMED, "named"),
    ],
)
def test_choices(tools: Any, choice: Any, expected: str) -> None:
    request = parse_tools(tools, choice, None)
    assert request.choice == expected
    assert request.is_active == (expected != "none")
    assert (request.definitions is None) == (expected == "none")
    if expected == "named":
        assert set(request.schemas) == {"f"}


def test_parallel() -> None:
    assert [parse_tools([tool()], None, value).parallel for value in (None, True, False)] == [True, True, False]


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ("x", None, "tools"),
        ({}, None, "tools"),
        ([tool(f"f{i}") for i in range(MAX_TOOLS + 1)], None, "tools"),
        ([tool(), tool()], None, "tools"),
        ([tool(description="x" * MAX_TOOLS_BYTES)], None, "tools"),
        ([5], None, "tools[0]"),
        ([tool(), {"function": {}}], None, "tools[1].type"),
        ([{"type": "function"}], None, "tools[0].function"),
        ([tool(None)], None, "tools[0].function.name"),
        ([tool("")], None, "tools[0].function.name"),
        ([tool("x" * 65)], None, "tools[0].function.name"),
        ([tool("a b")], None, "tools[0].function.name"),
        ([tool("a\n")], None, "tools[0].function.name"),
        ([tool(description=5)], None, "tools[0].function.description"),
        ([tool(strict=1)], None, "tools[0].function.strict"),
        ([tool(parameters=[])], None, "tools[0].function.parameters"),
        ([tool(parameters={"type": "string"})], None, "tools[0].function.parameters.type"),
        ([tool(parameters={"properties": []})], None, "tools[0].function.parameters.properties"),
        ([tool(parameters=nested(MAX_SCHEMA_DEPTH))], None, "tools[0].function"),
        ([tool(parameters=nested(10_000))], None, "tools[0].function"),
        ([tool()], "any", "tool_choice"),
        ([tool()], 5, "tool_choice"),
        ([tool()], ["auto"], "tool_choice"),
        (None, "required", "tool_choice"),
        ([tool()], {}, "tool_choice.type"),
        ([tool()], {"type": "function"}, "tool_choice.function.name"),
        ([tool("g")], NAMED, "tool_choice.function.name"),
        (None, NAMED, "tool_choice.function.name"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_ones(tools: Any, choice: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_tools(tools, choice, None)
    assert (caught.value.param, caught.value.code) == (param, "invalid_value")
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([{"type": "custom", "custom": {"name": "f"}}], None, "tools[0].type"),
        ([tool()], {"type": "allowed_tools", "allowed_tools": {}}, "tool_choice.type"),
    ],
)
def test_what_is_not_supported(tools: Any, choice: Any, param: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        parse_tools(tools, choice, None)
    assert caught.value.param == param


def test_the_depth_that_is_accepted() -> None:
    assert len(parse_tools([tool(parameters=nested(MAX_SCHEMA_DEPTH - 10))], None, None).tools) == 1
