"""Tools as a grammar: what llguidance lets through is what the style's parser reads as calls, and nothing else."""

from __future__ import annotations

import asyncio
import functools
import json
from typing import Any

import pytest

from server.chat_parts import PartsRules
from server.errors import InvalidRequest, UnsupportedParameter
from server.reasoning.styles import REASONING_STYLES
from server.tokenizer import Tokenizer
from server.tools.compile import compile_calls
from server.tools.definitions import ToolRequest, parse_tools
from server.tools.grammar import MAX_CALLS, CallGrammar
from server.tools.styles import TOOL_STYLES
from tests.models import EOS_ID, build_tokenizer
from tests.server.test_tool_parsers import coder, parse

llguidance = pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "get_weather"}},
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
WITH_SCHEMAS = ("hermes", "llama3_json", "mistral")
SPECIAL = ("[TOOL_CALLS]", "[ARGS]", "<tool_call>")


@functools.cache
def tokenizer(special: tuple[str, ...]) -> tuple[Any, Any, dict[str, int]]:
    own = build_tokenizer()
    own.add_special_tokens({"additional_special_tokens": ["<turn>", *special]})
    compiled = llguidance.LLTokenizer(own.backend_tokenizer.to_str(), eos_token=EOS_ID)
    return own.backend_tokenizer, compiled, {name: own.convert_tokens_to_ids(name) for name in special}


def grammar(style: str, special: tuple[str, ...] = (), **options: Any) -> CallGrammar:
    return CallGrammar(TOOL_STYLES[style], tokenizer(special)[2], **options)


def accepts(made: CallGrammar, request: ToolRequest, text: str, special: tuple[str, ...] = ()) -> bool:
    """Whether `text`, and then the end, is an answer that the grammar allows."""
    backend, compiled, _ = tokenizer(special)
    schemas = {"f": json.dumps(SCHEMA)} if made.style.name in WITH_SCHEMAS else {}
    matcher = llguidance.LLMatcher(compiled, made.compiled(request, schemas), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = [*backend.encode(text, add_special_tokens=False).ids, EOS_ID]
    return bool(matcher.validate_tokens(ids) == len(ids))


def call(style: str, name: str, arguments: str) -> str:
    """As the style's models write it."""
    match style:
        case "hermes":
            return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        case "llama3_json":
            return f'{{"name": "{name}", "parameters": {arguments}}}'
        case "mistral":
            return f'[TOOL_CALLS][{{"name": "{name}", "arguments": {arguments}}}]'
        case "qwen3_coder":
            return coder(name, **{key: json.dumps(value) for key, value in json.loads(arguments).items()})
    return f"[{name}({', '.join(f'{key}={value!r}' for key, value in json.loads(arguments).items())})]"


@pytest.mark.parametrize("style", TOOL_STYLES)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_calls(style: str, choice: str) -> None:
    request, made = parse_tools(TOOLS, choice, None), grammar(style)
    for name, arguments in (("f", '{"a": 5}'), ("get_weather", "{}")):
        text = call(style, name, arguments)
        assert accepts(made, request, text)
        _, ((read, written),) = parse(TOOL_STYLES[style].parser, [text])
        assert (read, json.loads(written).keys()) == (name, json.loads(arguments).keys())
    assert not accepts(made, request, call(style, "unknown", "{}"))
    assert not accepts(made, request, call(style, "f", '{"b": 5}'))
    assert not accepts(made, request, call(style, "f", '{"a": 5}')[:-2])
    assert accepts(made, request, "It is Paris.") == (choice == "auto")
    assert accepts(made, request, "") == (choice == "auto")


def test_a_schema_is_kept_to() -> None:
    request = parse_tools(TOOLS, "required", None)
    for style in WITH_SCHEMAS:
        for arguments in ('{"a": "x"}', "{}", '{"a": 1, "b": 2}', "[]"):
            assert not accepts(grammar(style), request, call(style, "f", arguments))
    for style in TOOL_STYLES.keys() - WITH_SCHEMAS:
        with pytest.raises(UnsupportedParameter):
            grammar(style).lark(request, {"f": json.dumps(SCHEMA)})


@pytest.mark.parametrize("style", TOOL_STYLES)
def test_one_function(style: str) -> None:
    request, made = parse_tools(TOOLS, NAMED, None), grammar(style)
    assert accepts(made, request, call(style, "get_weather", "{}"))
    assert not accepts(made, request, call(style, "f", '{"a": 5}'))
    assert not accepts(made, request, "\n".join([call(style, "get_weather", "{}")] * 2)), "it is called once"


@pytest.mark.parametrize(
    ("style", "several"),
    [
        ("hermes", call("hermes", "f", '{"a": 1}') + "\n" + call("hermes", "get_weather", '{"b": [1]}')),
        ("llama3_json", call("llama3_json", "f", '{"a": 1}') + "; " + call("llama3_json", "get_weather", "{}")),
        ("mistral", call("mistral", "f", '{"a": 1}')[:-1] + ', {"name": "get_weather", "arguments": {}}]'),
        ("pythonic", "[f(a=1), get_weather()]"),
        ("qwen3_coder", coder("f", a="1") + "\n" + coder("get_weather")),
    ],
)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_parallel_calls(style: str, several: str, choice: str) -> None:
    made = grammar(style)
    assert accepts(made, parse_tools(TOOLS, choice, True), several)
    assert not accepts(made, parse_tools(TOOLS, choice, False), several) or (
        choice == "auto" and style in ("hermes", "qwen3_coder")  # the second one is text, and dropped by `ChatParts`
    )
    assert [name for name, _ in parse(TOOL_STYLES[style].parser, [several])[1]] == ["f", "get_weather"]


@pytest.mark.parametrize(("style", "between"), [("hermes", "\n"), ("llama3_json", "; "), ("qwen3_coder", "\n")])
def test_demanded_calls_have_an_end(style: str, between: str) -> None:
    made, request = grammar(style), parse_tools(TOOLS, "required", None)
    one = call(style, "get_weather", "{}")
    assert accepts(made, request, between.join([one] * MAX_CALLS))
    assert not accepts(made, request, between.join([one] * (MAX_CALLS + 1)))


def test_text_before_calls() -> None:
    request = parse_tools(TOOLS, "auto", None)
    assert accepts(grammar("hermes"), request, "Let me see. " + call("hermes", "f", '{"a": 1}') + " So.")
    assert not accepts(grammar("hermes"), request, "Let me see. " + call("hermes", "f", '{"a": "x"}'))


def test_markers_that_are_special_tokens() -> None:
    request = parse_tools(TOOLS, "required", None)
    text = '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]get_weather[ARGS]{}'
    assert accepts(grammar("mistral", SPECIAL), request, text, SPECIAL)
    assert accepts(grammar("hermes", SPECIAL), request, call("hermes", "f", '{"a": 1}'), SPECIAL)
    free = parse_tools(TOOLS, "auto", None)
    assert accepts(grammar("mistral", SPECIAL), free, "Well. " + text, SPECIAL)
    assert not accepts(grammar("mistral", SPECIAL), free, text.replace("1", '"x"'), SPECIAL)


@pytest.mark.parametrize("is_open", [False, True])
def test_reasoning_comes_first(is_open: bool) -> None:
    request = parse_tools(TOOLS, "required", None)
    made = grammar("hermes", reasoning=REASONING_STYLES["qwen3"], begins_in_reasoning=is_open)
    thought = ("" if is_open else "<think>") + "So it is.\n</think>\n\n"
    assert accepts(made, request, thought + call("hermes", "f", '{"a": 1}'))
    assert not accepts(made, request, thought + "Paris.")
    assert accepts(made, request, call("hermes", "f", '{"a": 1}')) == (not is_open)


def test_hostile_names() -> None:
    """A property's name is data, wherever it stands."""
    name = 'a"} | TEXT //'
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {name: {}}}}}
    ]
    request = parse_tools(tools, "required", None)
    assert not accepts(grammar("pythonic"), request, "Paris")
    assert accepts(grammar("pythonic"), request, "[f()]")


# --- from a request to a checked grammar ------------------------------------------------------------------------------


def compiled(tools: Any, choice: Any, *, refuse: str = "\0", style: str = "hermes") -> list[str]:
    """The grammars that were checked, the last of which was taken. `refuse`: grammars with this in them are refused."""
    checked: list[str] = []

    def check_schema(schema: Any, where: str) -> str:
        text = json.dumps(schema)
        if "cyclic" in text:
            raise InvalidRequest("no", param=where)
        return text

    async def check_grammar(made: str, param: str) -> str:
        checked.append(made)
        if refuse in made:
            raise InvalidRequest("no", param=param)
        assert not llguidance.LLMatcher(tokenizer(())[1], made, log_level=0).is_error()
        return made

    rules = PartsRules(parse_tools(tools, choice, None), TOOL_STYLES[style])
    taken = asyncio.run(compile_calls(rules, Tokenizer(build_tokenizer()), check_schema, check_grammar))
    assert taken == (checked[-1] if checked else "")
    return checked


def function(name: str, *, strict: bool = False, **parameters: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, **parameters}
    return {"type": "function", "function": {"name": name, "strict": strict, "parameters": schema}}


def test_what_is_constrained() -> None:
    assert compiled([function("f")], "auto") == []
    assert compiled([function("f", strict=True)], "none") == []
    assert len(compiled([function("f", strict=True)], "auto")) == 1
    assert len(compiled([function("f")], "required")) == 1
    (free,) = compiled([function("f", strict=True), function("g", title="other")], "auto")
    assert "integer" in free
    assert "other" not in free
    (forced,) = compiled([function("f"), function("g", title="other")], "required")
    assert "other" in forced


def test_schemas_that_cannot_be_followed() -> None:
    with pytest.raises(InvalidRequest) as caught:
        compiled([function("f"), function("g", strict=True, title="cyclic")], "auto")
    assert caught.value.param == "tools[1].function.parameters"
    # Nobody asked for these to be.
    (made,) = compiled([function("f"), function("g", title="cyclic")], "required")
    assert "cyclic" not in made
    first, second = compiled([function("f", title="costly")], "required", refuse="costly")
    assert "costly" in first
    assert "costly" not in second
    assert len(compiled([function("f")], "required", style="pythonic")) == 1
    with pytest.raises(UnsupportedParameter):
        compiled([function("f", strict=True)], "required", style="pythonic")
