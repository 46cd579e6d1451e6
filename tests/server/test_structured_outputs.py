"""What a request may ask for, by which name, and what is refused before anything is compiled."""

from __future__ import annotations

from typing import Any

import pytest

from server.errors import APIError
from server.structured_outputs import MAX_CHOICE_CHARS, MAX_CHOICES, MAX_GRAMMAR_CHARS, constraint_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def json_schema(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", **fields}}}


@pytest.mark.parametrize(
    ("body", "kind", "value", "param"),
    [
        (json_schema(schema=SCHEMA, strict=True), "json", SCHEMA, "response_format.json_schema.schema"),
        (json_schema(schema=SCHEMA, strict=False), "json", SCHEMA, "response_format.json_schema.schema"),
        (json_schema(schema=SCHEMA, description="d"), "json", SCHEMA, "response_format.json_schema.schema"),
        (json_schema(), "json", {"type": "object"}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object"}}, "json", {"type": "object"}, "response_format"),
        ({"structured_outputs": {"json": SCHEMA}}, "json", SCHEMA, "structured_outputs.json"),
        ({"structured_outputs": {"json": "{}", "regex": None}}, "json", "{}", "structured_outputs.json"),
        ({"structured_outputs": {"json_object": True}}, "json", {"type": "object"}, "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a", "b", "a"]}}, "choice", ["a", "b"], "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "grammar", "root ::= x", "structured_outputs.grammar"),
        ({"guided_json": SCHEMA, "guided_decoding_backend": "auto"}, "json", SCHEMA, "guided_json"),
        ({"guided_regex": "a+", "response_format": {"type": "text"}}, "regex", "a+", "guided_regex"),
        ({"guided_choice": ["a"], "guided_json": None}, "choice", ["a"], "guided_choice"),
        ({"guided_grammar": "start: /x/", "structured_outputs": None}, "grammar", "start: /x/", "guided_grammar"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_forms(body: dict[str, Any], kind: str, value: Any, param: str) -> None:
    constraint = constraint_of(body)
    assert constraint is not None
    assert (constraint.kind, constraint.value, constraint.param) == (kind, value, param)
    assert (constraint.whitespace_pattern, constraint.compact) == (None, False)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"response_format": None, "structured_outputs": None, "guided_json": None},
        {"response_format": {"type": "text"}, "guided_choice": [], "guided_regex": "", "guided_json_object": False},
    ],
)
def test_nothing_asked_for(body: dict[str, Any]) -> None:
    assert constraint_of(body) is None


def test_whitespace() -> None:
    given = constraint_of({"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"})
    also = constraint_of({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}})
    none = constraint_of({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}})
    assert given is not None and also is not None and none is not None
    assert (given.whitespace_pattern, also.whitespace_pattern, none.compact) == (" ?", " ?", True)


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"response_format": "json"}, "response_format", "invalid_value"),
        ({"response_format": []}, "response_format", "invalid_value"),
        ({"response_format": {}}, "response_format.type", "invalid_value"),
        ({"response_format": {"type": ["text"]}}, "response_format.type", "invalid_value"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type", "unsupported_parameter"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "invalid_value"),
        (json_schema(name=""), "response_format.json_schema.name", "invalid_value"),
        (json_schema(name=5), "response_format.json_schema.name", "invalid_value"),
        (json_schema(strict="yes"), "response_format.json_schema.strict", "invalid_value"),
        ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
        ({"structured_outputs": "x"}, "structured_outputs", "invalid_value"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "invalid_value"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs", "invalid_value"),
        ({"structured_outputs": {"json": {}, "x" * 100_000: 1}}, "structured_outputs", "invalid_value"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "unsupported_parameter"),
        (
            {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
            "unsupported_parameter",
        ),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex", "invalid_value"),
        ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object", "invalid_value"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
            "invalid_value",
        ),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}},
            "structured_outputs",
            "invalid_value",
        ),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "invalid_value"),
        (
            {"guided_json": {"a": 1}, "guided_whitespace_pattern": " " * 201},
            "guided_whitespace_pattern",
            "invalid_value",
        ),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": {}}, "guided_whitespace_pattern", "invalid_value"),
        ({"guided_whitespace_pattern": False}, "guided_whitespace_pattern", "invalid_value"),
        ({"guided_regex": {}}, "guided_regex", "invalid_value"),
        ({"guided_choice": ""}, "guided_choice", "invalid_value"),
        ({"guided_grammar": False}, "guided_grammar", "invalid_value"),
        ({"guided_json_object": {}}, "guided_json_object", "invalid_value"),
        ({"guided_decoding_backend": 5}, "guided_decoding_backend", "invalid_value"),
        ({"guided_json_object": 1}, "guided_json_object", "invalid_value"),
        ({"guided_choice": "a"}, "guided_choice", "invalid_value"),
        ({"guided_choice": ["a", 5]}, "guided_choice", "invalid_value"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "invalid_value"),
        ({"guided_choice": [str(i) for i in range(MAX_CHOICES + 1)]}, "guided_choice", "invalid_value"),
        ({"guided_choice": ["a" * (MAX_CHOICE_CHARS + 1)]}, "guided_choice", "invalid_value"),
        ({"guided_grammar": 5}, "guided_grammar", "invalid_value"),
        ({"guided_grammar": "x" * (MAX_GRAMMAR_CHARS + 1)}, "guided_grammar", "invalid_value"),
        ({"guided_regex": "foo**"}, "guided_regex", "invalid_value"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "invalid_value"),
        ({"response_format": {"type": "json_object"}, "guided_json": SCHEMA}, "guided_json", "invalid_value"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_refused(body: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(APIError) as caught:
        constraint_of(body)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)
    assert len(caught.value.message) < 500
