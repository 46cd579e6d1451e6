"""The parsers of tool calls: what each style writes, what only looks like it, and what went wrong on the way."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.reasoning.styles import REASONING_STYLES
from server.serve_command import REASONING_PARSERS, TOOL_PARSERS
from server.tools.events import CallArguments, CallEnded, CallStarted, Text, ToolParser
from server.tools.hermes import HermesParser
from server.tools.json_calls import MAX_CALLS
from server.tools.llama3 import Llama3Parser
from server.tools.mistral import MistralParser
from server.tools.pythonic import PythonicParser
from server.tools.qwen3_coder import Qwen3CoderParser
from server.tools.styles import TOOL_STYLES, load_tool_style, tool_style_of
from tests.server.splits import pieces_of

TOOLS: dict[str, dict[str, Any]] = {
    "f": {
        "properties": {
            "n": {"type": "integer"},
            "list": {"type": "array"},
            "flag": {"type": ["boolean", "null"]},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        }
    },
    "get_weather": {},
}
Parser = Callable[[Mapping[str, Mapping[str, Any]], frozenset[str]], ToolParser]
Calls = list[tuple[str, str]]


def parse(parser: Parser, pieces: Sequence[str], hidden: frozenset[str] = frozenset()) -> tuple[str, Calls]:
    """(text, calls). Every call is closed before anything else comes."""
    made = parser(TOOLS, hidden)
    text, calls, is_open = "", [], False
    for event in [event for piece in pieces for event in made.push(piece)] + made.flush():
        match event:
            case Text(more):
                assert not is_open
                text += more
            case CallStarted(name):
                assert not is_open
                calls.append((name, ""))
                is_open = True
            case CallArguments(more):
                assert is_open
                calls[-1] = (calls[-1][0], calls[-1][1] + more)
            case CallEnded():
                assert is_open
                is_open = False
    assert not is_open
    return text, calls


def check(parser: Parser, given: str, text: str, calls: Calls) -> None:
    assert parse(parser, [given]) == (text, calls)
    assert parse(parser, list(given)) == (text, calls)


CALL = '{"name": "f", "arguments": {"a": [1, {"b": "}<\\" "}]}}'
ARGUMENTS = '{"a": [1, {"b": "}<\\" "}]}'


@pytest.mark.parametrize(
    ("given", "text", "calls"),
    [
        (f"<tool_call>\n{CALL}\n</tool_call>", "", [("f", ARGUMENTS)]),
        (f"hi <tool_call>{CALL}</tool_call> bye", "hi  bye", [("f", ARGUMENTS)]),
        (f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", "\n", [("f", ARGUMENTS)] * 2),
        (f"<tool_call>[{CALL}, {CALL}]</tool_call>", "", [("f", ARGUMENTS)] * 2),
        (f"<tool_call>{CALL}\n{CALL}", "", [("f", ARGUMENTS)] * 2),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a":1}')]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"function": {"name": "f", "arguments": {}}}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {}, "id": {"x": 1}}</tool_call>!', "!", [("f", "{}")]),
        ('<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', "", [("unknown", "{}")]),
        # one brace too few, as small models write it
        ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>!', "!", [("f", '{"a": 1}')]),
        # not closed
        (f"<tool_call>{CALL}", "", [("f", ARGUMENTS)]),
        (f"<tool_call>{CALL}</tool_", "", [("f", ARGUMENTS)]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
        # wrong within the arguments: it stays there
        ('<tool_call>{"name": "f", "arguments": {"a": <1}}</tool_call>!', "!", [("f", '{"a": <1}}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": [}', "", [("f", '{"a": [}')]),
        # no call
        ("a < b <tool <tool_calls>", "a < b <tool <tool_calls>", []),
        ("<tool_call>what?</tool_call>", "<tool_call>what?</tool_call>", []),
        ("<tool_call></tool_call>", "<tool_call></tool_call>", []),
        ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
        ('<tool_call>{"name": "f", "arguments": 5}', '<tool_call>{"name": "f", "arguments": 5}', []),
        ('<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
        ("<tool_call>\n {x}", "<tool_call>\n {x}", []),
        (f"<tool_call>no <tool_call>{CALL}", "<tool_call>no ", [("f", ARGUMENTS)]),
        ("", "", []),
    ],
)
def test_hermes(given: str, text: str, calls: Calls) -> None:
    check(HermesParser, given, text, calls)


LLAMA_CALL = '{"name": "f", "parameters": {"a": "b"}}'


@pytest.mark.parametrize(
    ("given", "text", "calls"),
    [
        (LLAMA_CALL, "", [("f", '{"a": "b"}')]),
        (f" \n{LLAMA_CALL}; {LLAMA_CALL}", "", [("f", '{"a": "b"}')] * 2),
        (f"<|python_tag|>{LLAMA_CALL}", "", [("f", '{"a": "b"}')]),
        (f"Well: <|python_tag|>{LLAMA_CALL}", "Well: ", [("f", '{"a": "b"}')]),
        ('{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
        ('<|python_tag|>{"name": "unknown", "parameters": {}}', "", [("unknown", "{}")]),
        ('{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', []),
        ('{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', []),
        (' {"a": {"name": "f"}}', ' {"a": {"name": "f"}}', []),
        ("{", "{", []),
        ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        (f"It is {LLAMA_CALL}", f"It is {LLAMA_CALL}", []),
        ("  ", "  ", []),
    ],
)
def test_llama3(given: str, text: str, calls: Calls) -> None:
    check(Llama3Parser, given, text, calls)


def test_an_answer_that_is_json_is_not_held_back() -> None:
    for text in ('{"city": ', '{"name": "Ada", '):
        parser = Llama3Parser(TOOLS)
        assert [event for piece in text for event in parser.push(piece)] != []


@pytest.mark.parametrize(
    ("given", "text", "calls"),
    [
        (f"[TOOL_CALLS][{CALL}, {CALL}]", "", [("f", ARGUMENTS)] * 2),
        (f"[TOOL_CALLS] {CALL}", "", [("f", ARGUMENTS)]),
        ('Hm.[TOOL_CALLS]f[ARGS]{"a": 1}', "Hm.", [("f", '{"a": 1}')]),
        ("[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]get_weather[CALL_ID]a1[ARGS]{}", "", [("f", "{}"), ("get_weather", "{}")]),
        ('[TOOL_CALLS]f{"a": 1}', "", [("f", '{"a": 1}')]),
        ('[TOOL_CALLS]f[ARGS]{"a": 1', "", [("f", '{"a": 1')]),
        ("[TOOL_CALLS]f or not", "[TOOL_CALLS]f or not", []),
        ("[TOOL_CALLS]f[ARGS]", "[TOOL_CALLS]f[ARGS]", []),
        ("a[0] [TOOL", "a[0] [TOOL", []),
    ],
)
def test_mistral(given: str, text: str, calls: Calls) -> None:
    check(MistralParser, given, text, calls)


@pytest.mark.parametrize(
    ("given", "text", "calls"),
    [
        ("[f()]", "", [("f", "{}")]),
        ("""[f(a=1, b = 'it\\'s "x"', c=[1, 2,], d={'k': True}), f(z=None)]""", "",
         [("f", """{"a":1, "b": "it's \\"x\\"", "c":[1, 2], "d":{"k": true}}"""), ("f", '{"z":null}')]),
        ("[f(a=(1, (2,)), b=-1.5e3, c=celsius,)]", "", [("f", '{"a":[1, [2]], "b":-1.5e3, "c":"celsius"}')]),
        ("[f(a='\\n\\x41\\u00e9\\U0001F600\\d\\ud800')]", "", [("f", '{"a":"\\nAé😀\\\\d\\ud800"}')]),
        ("[f(a0=1, a1=2.5, a2=\"x\", a3=3)]", "", [("f", '{"a0":1, "a1":2.5, "a2":"x", "a3":3}')]),
        ("<|tool_call_start|>[f(a=1)]<|tool_call_end|>Done.", "Done.", [("f", '{"a":1}')]),
        ("Well. <|python_start|>[f(a=1)]<|python_end|>", "Well. ", [("f", '{"a":1}')]),
        ("[f(a=1), unknown()]", ", unknown()]", [("f", '{"a":1}')]),
        # cut off, or wrong within the arguments
        ("[f(a=1, b=[2", "", [("f", '{"a":1, "b":[2')]),
        ("[f(a='x", "", [("f", '{"a":"x')]),
        ("[f('x')]!", "", [("f", "{'x')]!")]),
        ("[f(a=1 2)]", "", [("f", '{"a":1 2)]')]),
        ("[f(a=[1)]", "", [("f", '{"a":[1)]')]),
        ("[f(a=g(1))]", "", [("f", '{"a":"g"(1))]')]),
        # no call
        ("[1, 2, 3]", "[1, 2, 3]", []),
        ("[unknown(a=1)]", "[unknown(a=1)]", []),
        ("[f (", "", [("f", "")]),
        ("[f", "[f", []),
        (" [get_weather]", " [get_weather]", []),
        ("It is [f(a=1)]", "It is [f(a=1)]", []),
    ],
)  # fmt: skip
def test_pythonic(given: str, text: str, calls: Calls) -> None:
    check(PythonicParser, given, text, calls)


def coder(function: str, **arguments: str) -> str:
    """As Qwen3-Coder writes a call."""
    parameters = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in arguments.items())
    return f"<tool_call>\n<function={function}>\n{parameters}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("given", "text", "calls"),
    [
        (coder("f", a="Paris", n="2"), "", [("f", '{"a": "Paris", "n": 2}')]),
        (coder("f"), "", [("f", "{}")]),
        (f"Well. {coder('f', a='x')}\n{coder('f')}!", "Well. \n!", [("f", '{"a": "x"}'), ("f", "{}")]),
        (coder("f", a='\n"two\nlines"\\\n</p\n'), "", [("f", '{"a": "\\n\\"two\\nlines\\"\\\\\\n</p\\n"}')]),
        (coder("f", list='[1, {"a": "b"}]', flag="True"), "", [("f", '{"list": [1, {"a": "b"}], "flag": true}')]),
        (coder("f", maybe="null", flag="None"), "", [("f", '{"maybe": null, "flag": null}')]),
        (coder("f", n="many", maybe="5"), "", [("f", '{"n": "many", "maybe": "5"}')]),
        ("<function=f><parameter=a>x</parameter></function>", "", [("f", '{"a": "x"}')]),
        ("<tool_call><function=unknown></function></tool_call>", "", [("unknown", "{}")]),
        # cut off, or wrong within the arguments
        ("<tool_call><function=f><parameter=a>x</par", "", [("f", '{"a": "x</par')]),
        ("<tool_call><function=f><parameter=n>12", "", [("f", '{"n": 12')]),
        ("<tool_call><function=f>what</function></tool_call>!", "!", [("f", "{what")]),
        # no call
        ("<tool_call>what</tool_call>", "<tool_call>what</tool_call>", []),
        ("a <function=> b", "a <function=> b", []),
        ("<tool_call>\n<functi", "<tool_call>\n<functi", []),
        ("1 < 2", "1 < 2", []),
    ],
)
def test_qwen3_coder(given: str, text: str, calls: Calls) -> None:
    check(Qwen3CoderParser, given, text, calls)


PYTHON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.floats(allow_nan=False, allow_infinity=False, width=16)
    | st.text("ab'\"\\\n\té=,()[]{}#😀\x00", max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text("k'\"", max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["a", "b", "c_1", "True_"]), PYTHON_VALUES, max_size=4), st.data())
def test_pythons_own_literals(arguments: dict[str, Any], data: st.DataObject) -> None:
    call = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    text, ((name, written),) = parse(PythonicParser, pieces_of(f"[f({call})]", data))
    assert (text, name) == ("", "f")
    assert json.loads(written) == json.loads(json.dumps(arguments))


STYLES: dict[str, tuple[Parser, Callable[[str, str], str], str]] = {
    # the parser, (name, arguments) to a call, what stands between calls
    "hermes": (
        HermesParser,
        lambda name, arguments: f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>',
        "",
    ),
    "llama3_json": (Llama3Parser, lambda name, arguments: f'{{"name": "{name}", "parameters": {arguments}}}', "; "),
    "mistral": (MistralParser, lambda name, arguments: f"[TOOL_CALLS]{name}[ARGS]{arguments}", ""),
}
JSON = st.dictionaries(
    st.text('a"\\é', max_size=3),
    st.integers()
    | st.text('x"\\{}[]<>\n', max_size=6)
    | st.lists(st.dictionaries(st.text("b", max_size=1), st.none())),
    max_size=3,
)


@pytest.mark.parametrize("style", STYLES)
@given(st.lists(st.tuples(st.sampled_from(sorted(TOOLS)), JSON), min_size=1, max_size=3), st.data())
def test_calls_come_out_as_they_went_in(style: str, calls: list[tuple[str, Any]], data: st.DataObject) -> None:
    parser, write, between = STYLES[style]
    written = [(name, json.dumps(arguments)) for name, arguments in calls]
    text = between.join(write(name, arguments) for name, arguments in written)
    assert parse(parser, pieces_of(text, data)) == ("", written)


SNIPPETS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|tool_call_start|>",
    '{"name": "f", "arguments": {', '{"name": "f", "parameters": {', '"a": 1', '{"a"', "f", "[f(", "a=", "'", '"', "\\",
    "<function=", "f>", "<function=f>", "<parameter=a>", "<parameter=n>", "</parameter>", "</function>",
    "{", "}", "[", "]", "(", ")", ",", " ", "\n", "<", "x", "1", ":", ";", "é", "True",
]  # fmt: skip


@pytest.mark.parametrize("style", TOOL_STYLES)
@given(st.lists(st.sampled_from(SNIPPETS), max_size=16).map("".join), st.data())
def test_splits_make_no_difference(style: str, text: str, data: st.DataObject) -> None:
    parser = TOOL_STYLES[style].parser
    hidden = frozenset(data.draw(st.sets(st.sampled_from(TOOL_STYLES[style].markers))))
    whole, calls = parse(parser, [text], hidden)
    assert parse(parser, pieces_of(text, data), hidden) == (whole, calls)
    if not calls and not hidden:
        assert whole == text


@pytest.mark.parametrize(
    ("style", "text", "expected"),
    [
        ("hermes", "a <tool_call> b", "a  b"),
        ("mistral", "[TOOL_CALLS]f or not", "f or not"),
        ("mistral", "a[ARGS]b[TOOL_CALLS]", "ab"),
        ("pythonic", "x<|tool_call_end|><|python_start|>[y]", "x[y]"),
    ],
)
def test_markers_that_are_special_tokens_are_never_content(style: str, text: str, expected: str) -> None:
    markers = frozenset(TOOL_STYLES[style].markers)
    assert parse(TOOL_STYLES[style].parser, [text], markers) == (expected, [])
    assert parse(TOOL_STYLES[style].parser, list(text), markers) == (expected, [])


@pytest.mark.parametrize(
    ("style", "call", "num_calls"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', MAX_CALLS),
        ("llama3_json", '{"name": "f", "parameters": {}};', MAX_CALLS),
        ("mistral", "[TOOL_CALLS]f[ARGS]{}", MAX_CALLS),
        ("pythonic", "<|python_start|>[f()]<|python_end|>", MAX_CALLS),
        ("qwen3_coder", "<tool_call><function=f></function></tool_call>", MAX_CALLS),
    ],
)
def test_more_calls_than_anybody_means(style: str, call: str, num_calls: int) -> None:
    text, calls = parse(TOOL_STYLES[style].parser, [call * (MAX_CALLS + 3)])
    assert len(calls) == num_calls
    assert text.rstrip(";").endswith(call.rstrip(";"))


@pytest.mark.parametrize(
    ("template", "style"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{{ tools }}[TOOL_CALLS]", "mistral"),
        ('{% if tools %}{"name": function name, "parameters": dictionary}', "llama3_json"),
        ("{{ tools }}<|python_tag|>", "llama3_json"),
        ("{{ tools }}<|tool_call_start|>", "pythonic"),
        ("{{ tools }} [func_name1(params_name1=params_value1)]", "pythonic"),
        ("{{ tools }}<tool_call>\n<function=x>\n<parameter=y>", "qwen3_coder"),
        ("{{ tools }}<｜tool▁calls▁begin｜>", None),
        ("<tool_call>", None),
        ("{{ tools }}", None),
    ],
)
def test_styles_of_templates(template: str, style: str | None) -> None:
    assert tool_style_of(template) is (None if style is None else TOOL_STYLES[style])
    assert load_tool_style("auto", template) is tool_style_of(template)


def test_styles_by_name() -> None:
    assert load_tool_style("none", "{{ tools }}<tool_call>") is None
    assert load_tool_style("mistral", "") is TOOL_STYLES["mistral"]
    with pytest.raises(ValueError, match="--tool-call-parser"):
        load_tool_style("x", "")


def test_the_flags_know_every_style() -> None:
    assert set(TOOL_PARSERS) == {"auto", "none", *TOOL_STYLES}
    assert set(REASONING_PARSERS) == {"auto", "none", *REASONING_STYLES}
