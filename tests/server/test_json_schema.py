"""The checks that come before the compiler, and what is left out of a schema."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from server.errors import InvalidRequest
from server.json_schema import (
    MAX_REGEX_CHARS,
    MAX_SCHEMA_BYTES,
    MAX_SCHEMA_DEPTH,
    MAX_SCHEMA_PARTS,
    check_regex,
    parse_schema,
)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"not": schema}
    return schema


def listed(depth: int) -> dict[str, Any]:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return {"enum": value}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        # A format that is not enforced is an annotation; a property of that name, or a value, is not a format.
        ({"format": "path", "type": "string"}, {"type": "string"}),
        ({"format": "uuid"}, {"format": "uuid"}),
        ({"properties": {"format": {"type": "null"}}}, {"properties": {"format": {"type": "null"}}}),
        ({"properties": {"a": {"items": {"format": "x"}}}}, {"properties": {"a": {"items": {}}}}),
        ({"enum": [{"format": "x"}], "const": {"format": "x"}}, {"enum": [{"format": "x"}], "const": {"format": "x"}}),
        ({"anyOf": [{"format": "x"}, {"x-guidance": {}}]}, {"anyOf": [{}, {}]}),
        # The compiler's own options are not the client's to set.
        ({"x-guidance": {"lenient": True}, "type": "null"}, {"type": "null"}),
        ('{"b": 1, "a": [1.5, null]}', {"b": 1, "a": [1.5, None]}),
        (True, {}),
        (nested(MAX_SCHEMA_DEPTH - 1), nested(MAX_SCHEMA_DEPTH - 1)),
    ],
    ids=lambda value: repr(value)[:50],
)
def test_what_is_left(schema: Any, expected: Any) -> None:
    assert json.loads(parse_schema(schema, "p")) == expected


def test_the_order_of_properties_is_kept() -> None:
    names = [f"p{i * 7919 % 100}" for i in range(100)]
    assert list(json.loads(parse_schema({"properties": {name: {} for name in names}}, "p"))["properties"]) == names


@pytest.mark.parametrize(
    "schema",
    [
        5,
        None,
        [],
        False,
        "nonsense",
        "[]",
        '{"const": "\\ud800"}',
        '{"a": ' * 10_000 + "1" + "}" * 10_000,
        nested(MAX_SCHEMA_DEPTH + 1),
        nested(500),
        listed(MAX_SCHEMA_DEPTH),
        {"enum": list(range(MAX_SCHEMA_PARTS))},
        {"properties": {str(i): {"type": "null"} for i in range(MAX_SCHEMA_PARTS // 2)}},
        {"const": "x" * MAX_SCHEMA_BYTES},
        '"' + "x" * MAX_SCHEMA_BYTES + '"',
        {"pattern": "a**"},
        {"patternProperties": {"a**": {}}},
        {"items": [{"properties": {"x": {"pattern": "a" * (MAX_REGEX_CHARS + 1)}}}]},
    ],
    ids=lambda value: repr(value)[:40],
)
def test_refused(schema: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_schema(schema, "the.field")
    assert caught.value.param == "the.field" and "the.field" in caught.value.message


STACKED = [
    "a**",
    "a*+",
    "a{2}{3}",
    "a??*",
    "(a|b)+{2,}",
    "[a*]**",
    "\\**+",
    "x(?:y)*?+",
    "a{1,2}?{3}",
    "[]]**",
    "[^]]**",
]
PLAIN = [
    "a*b*", "a*?", "a+?b", "a??", "a{2,3}?", "(a*)*", "(?:a+)+", "\\*\\*", "[*+]*", "a\\+*", "[a[*]+]*", "(?i)a*",
    "(?P<name>a)*", "(?s:.)*", "a|*" , "[]*]*", "[^]*]+", "\\[*b*", "a{,3}", "a{x}*", "\\", "[", "[a", "",
]  # fmt: skip


@pytest.mark.parametrize("pattern", STACKED)
def test_stacked_quantifiers_are_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequest, match="quantifier"):
        check_regex(pattern, "p")


@pytest.mark.parametrize("pattern", PLAIN)
def test_plain_patterns_are_not(pattern: str) -> None:
    if pattern:
        check_regex(pattern, "p")


def test_python_agrees() -> None:
    """Its `re` refuses what is stacked, but for the possessive forms, which mean something else in other dialects."""
    possessive = {"a*+", "\\**+", "x(?:y)*?+"}
    for pattern in set(STACKED) - possessive:
        with pytest.raises(re.error, match="multiple repeat"):
            re.compile(pattern)


@pytest.mark.parametrize("pattern", ["", "a" * (MAX_REGEX_CHARS + 1)])
def test_length(pattern: str) -> None:
    with pytest.raises(InvalidRequest):
        check_regex(pattern, "p")


def test_a_long_pattern_costs_one_pass() -> None:
    for piece in ("[", "(?", "(?P<", "{", "\\", "[^]", "a*"):
        pattern = (piece * MAX_REGEX_CHARS)[:MAX_REGEX_CHARS]
        check_regex(pattern, "p")
