"""The parameters by which a client asks for an answer of a certain form, as one `Constraint`.

OpenAI's `response_format`, and vLLM's `structured_outputs` with its older names, `guided_*`. A request has one of them
or none: which of two should hold, nobody can say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from server.errors import InvalidRequest, UnsupportedParameter
from server.json_schema import check_regex

Kind = Literal["json", "regex", "choice", "grammar"]

MAX_CHOICES = 4096
MAX_CHOICE_CHARS = 65536
"""All choices together."""
MAX_GRAMMAR_CHARS = 65536
MAX_WHITESPACE_CHARS = 200
"""Of a pattern for it."""

_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Constraint:
    kind: Kind
    value: Any
    """"json": a schema, unchecked; "choice": a list of strings; else a string."""
    param: str
    """The field that it came in."""
    whitespace_pattern: str | None = None
    """Between the tokens of JSON, where some is wanted; None is the compiler's default."""
    compact: bool = False
    """JSON without any whitespace."""


def constraint_of(body: Mapping[str, Any]) -> Constraint | None:
    """Raises InvalidRequest, or UnsupportedParameter for forms that this server does not know. Cheap: what takes time
    is left to the compiler's threads."""
    found = [each for each in (_response_format(body), _structured_outputs(body), *_guided(body)) if each is not None]
    if len(found) > 1:
        names = " and ".join(each.param for each in found[:2])
        raise InvalidRequest(f"{names} exclude each other: an answer has one form.", param=found[1].param)
    return found[0] if found else None


# --- OpenAI's -----------------------------------------------------------------------------------------------------


def _response_format(body: Mapping[str, Any]) -> Constraint | None:
    value = body.get("response_format")
    if value is None:
        return None
    kind = _object(value, "response_format").get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint("json", _ANY_OBJECT, "response_format")
    if kind == "structural_tag":
        raise UnsupportedParameter(
            "response_format.type structural_tag is not supported.", param="response_format.type"
        )
    if kind != "json_schema":
        raise InvalidRequest(
            "response_format.type must be text, json_object or json_schema.", param="response_format.type"
        )
    param = "response_format.json_schema"
    inner = _object(value.get("json_schema"), param)
    name = inner.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= 64:
        raise InvalidRequest(f"{param}.name must be a string of 1 to 64 characters.", param=f"{param}.name")
    if not isinstance(inner.get("strict"), bool | None):
        raise InvalidRequest(f"{param}.strict must be a boolean.", param=f"{param}.strict")
    schema = inner.get("schema")
    return Constraint("json", _ANY_OBJECT if schema is None else schema, f"{param}.schema")


# --- vLLM's -------------------------------------------------------------------------------------------------------


def _structured_outputs(body: Mapping[str, Any]) -> Constraint | None:
    name = "structured_outputs"
    value = body.get(name)
    if value is None:
        return None
    for key in _object(value, name):
        if key not in _PARSERS and key not in _OPTIONS:
            raise InvalidRequest(f"{name} has no member {key[:50]!r}.", param=name)
    for key in ("structural_tag", "disable_additional_properties"):
        if value.get(key):
            raise UnsupportedParameter(f"{name}.{key} is not supported.", param=f"{name}.{key}")
    for key in ("disable_any_whitespace", "disable_fallback"):
        _boolean(value.get(key), f"{name}.{key}")
    given = [key for key in _PARSERS if value.get(key) is not None and value[key] is not False]
    if len(given) != 1:
        raise InvalidRequest(f"{name} must have exactly one of {', '.join(_PARSERS)}.", param=name)
    compact = bool(value.get("disable_any_whitespace"))
    pattern = _whitespace(value.get("whitespace_pattern"), f"{name}.whitespace_pattern")
    if compact and pattern is not None:
        raise InvalidRequest(f"{name}: whitespace_pattern excludes disable_any_whitespace.", param=name)
    constraint = _PARSERS[given[0]](value[given[0]], f"{name}.{given[0]}")
    return _with_whitespace(constraint, pattern, compact, f"{name}.whitespace_pattern")


def _guided(body: Mapping[str, Any]) -> list[Constraint]:
    found = []
    for key, parse in _PARSERS.items():
        value = body.get(f"guided_{key}")
        # By type: the empty value of another one is a mistake.
        if value is not None and not any(type(value) is type(empty) and value == empty for empty in _UNSET[key]):
            found.append(parse(value, f"guided_{key}"))
    if not isinstance(body.get("guided_decoding_backend"), str | None):
        raise InvalidRequest("guided_decoding_backend must be a string.", param="guided_decoding_backend")
    param = "guided_whitespace_pattern"
    value = body.get(param)
    pattern = _whitespace(None if value == "" else value, param)
    if pattern is None:
        return found
    if not found:
        raise InvalidRequest(f"{param} needs guided_json.", param=param)
    return [_with_whitespace(each, pattern, False, param) for each in found]


def _json(value: Any, param: str) -> Constraint:
    return Constraint("json", value, param)


def _json_object(value: Any, param: str) -> Constraint:
    _boolean(value, param)
    return Constraint("json", _ANY_OBJECT, param)


def _regex(value: Any, param: str) -> Constraint:
    check_regex(_string(value, param), param)
    return Constraint("regex", value, param)


def _choice(value: Any, param: str) -> Constraint:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CHOICES:
        raise InvalidRequest(f"{param} must be a list of 1 to {MAX_CHOICES} strings.", param=param)
    if not all(isinstance(each, str) and each for each in value):
        raise InvalidRequest(f"{param} must have strings only, none of them empty.", param=param)
    if sum(map(len, value)) > MAX_CHOICE_CHARS:
        raise InvalidRequest(f"{param} must have at most {MAX_CHOICE_CHARS} characters in all.", param=param)
    return Constraint("choice", list(dict.fromkeys(value)), param)


def _grammar(value: Any, param: str) -> Constraint:
    if not 1 <= len(_string(value, param)) <= MAX_GRAMMAR_CHARS:
        raise InvalidRequest(f"{param} must have 1 to {MAX_GRAMMAR_CHARS} characters.", param=param)
    return Constraint("grammar", value, param)


_PARSERS: dict[str, Callable[[Any, str], Constraint]] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _json_object,
}
_UNSET: dict[str, tuple[Any, ...]] = {
    "json": ("", {}, False),
    "regex": ("",),
    "choice": ([],),
    "grammar": ("",),
    "json_object": (False,),
}
"""Values of the `guided_` names that ask for nothing."""
_OPTIONS = frozenset(
    {
        "_backend",
        "_backend_was_auto",
        "disable_additional_properties",
        "disable_any_whitespace",
        "disable_fallback",
        "structural_tag",
        "whitespace_pattern",
    }
)


def _with_whitespace(constraint: Constraint, pattern: str | None, compact: bool, param: str) -> Constraint:
    if pattern is not None and constraint.kind != "json":
        raise InvalidRequest(f"{param} is for JSON only.", param=param)
    return Constraint(constraint.kind, constraint.value, constraint.param, pattern, compact)


def _whitespace(value: Any, param: str) -> str | None:
    if value is None:
        return None
    pattern = _string(value, param)
    check_regex(pattern, param)
    if len(pattern) > MAX_WHITESPACE_CHARS:
        raise InvalidRequest(f"{param} must have at most {MAX_WHITESPACE_CHARS} characters.", param=param)
    return pattern


def _object(value: Any, param: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param} must be an object.", param=param)
    return value


def _string(value: Any, param: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{param} must be a string.", param=param)
    return value


def _boolean(value: Any, param: str) -> None:
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"{param} must be a boolean.", param=param)
