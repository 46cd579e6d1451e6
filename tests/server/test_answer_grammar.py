"""What an answer is held to: calls that are demanded, arguments that fit, forms, each behind the model's reasoning. The
engine is scripted; the grammars that it is sent are compiled in real processes, and judged by llguidance."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

import llguidance
import pytest

from server.chat_template import ChatTemplate
from server.grammars import Grammars
from server.reasoning.styles import REASONING_STYLES
from server.tools.styles import TOOL_STYLES
from tests.models import EOS_ID, VOCAB_SIZE
from tests.server.fakes import Api, FakeEngine, Line, ids_of, services, tokenizer
from tests.server.test_chat_tools import HELLO, LONG_MODEL, ROUTE, TEMPLATE, cut_off, say, tool

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [tool("f"), tool("weather", parameters=SCHEMA)]
STRICT = [tool("f"), tool("weather", parameters=SCHEMA, strict=True)]
NAMED = {"type": "function", "function": {"name": "weather"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
WRONG = CALL.replace('"Paris"', "5")
OTHER = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
JSON = {"response_format": {"type": "json_object"}}
THINKS: dict[str, Any] = {"reasoning_style": REASONING_STYLES["qwen3"]}


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(tokenizer(), VOCAB_SIZE)
    yield made
    made.close()


class Served:
    def __init__(self, grammars: Grammars, text: str, *, ends: bool = True, style: str = "hermes", **changes: Any):
        self.engine = FakeEngine(say(text) if ends else cut_off(text))
        given: dict[str, Any] = {
            "chat_template": ChatTemplate(tokenizer(), TEMPLATE),
            "model": LONG_MODEL,
            "tool_style": TOOL_STYLES[style],
            "grammars": grammars,
        }
        self.api = Api(services(self.engine, **given | changes))

    def ask(self, **body: Any) -> Any:
        response = self.api.post(ROUTE, {"messages": HELLO, **body})
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]

    def refused(self, **body: Any) -> tuple[str, str]:
        """By which field, and why; a dry run says the same."""
        errors = []
        for route in (ROUTE, f"{ROUTE}/render"):
            response = self.api.post(route, {"messages": HELLO, **body})
            assert response.status_code == 400, response.text
            errors.append(response.json()["error"])
        assert errors[0] == errors[1]
        assert not self.engine.submitted
        return errors[0]["param"], errors[0]["code"]

    def allows(self, *texts: str) -> list[bool]:
        """Whether each is an answer that the engine was told to allow."""
        grammar = self.engine.submitted[-1].sampling.grammar
        assert grammar
        return [_allows(grammar, text) for text in texts]


def _allows(grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(_compiler(), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = [*ids_of(text), EOS_ID]
    return bool(matcher.validate_tokens(ids) == len(ids))


@functools.cache
def _compiler() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(tokenizer().as_json(), eos_token=EOS_ID)


# --- calls ------------------------------------------------------------------------------------------------------------


def test_a_call_is_demanded(grammars: Grammars) -> None:
    served = Served(grammars, CALL)
    choice = served.ask(tools=TOOLS, tool_choice="required")
    assert served.allows(CALL, OTHER, f"{OTHER}\n{CALL}", WRONG, "Paris.", "") == [True] * 3 + [False] * 3
    assert choice["finish_reason"] == "tool_calls"
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}


def test_one_call_is_demanded(grammars: Grammars) -> None:
    served = Served(grammars, CALL)
    served.ask(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert served.allows(CALL, f"{OTHER}\n{CALL}") == [True, False]


@pytest.mark.parametrize("parallel", [None, True])
def test_a_function_is_demanded(grammars: Grammars, parallel: bool | None) -> None:
    """Once, also where calls may be parallel. OpenAI's finish reason is "stop" then: the call is no news."""
    served = Served(grammars, f"{CALL}\n{CALL}")
    choice = served.ask(tools=TOOLS, tool_choice=NAMED, parallel_tool_calls=parallel)
    assert served.allows(CALL, OTHER, WRONG, "Paris.", f"{CALL}\n{CALL}") == [True] + [False] * 4
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"


def test_a_demanded_call_that_is_cut_off(grammars: Grammars) -> None:
    for wanted in ("required", NAMED):
        choice = Served(grammars, CALL[:60], ends=False).ask(tools=TOOLS, tool_choice=wanted)
        assert (choice["finish_reason"], len(choice["message"]["tool_calls"])) == ("length", 1)


def test_strict_arguments(grammars: Grammars) -> None:
    served = Served(grammars, "Paris.")
    served.ask(tools=STRICT)
    assert served.allows("Paris.", f"Well. {CALL}", OTHER, WRONG) == [True, True, True, False]


def test_what_is_not_constrained(grammars: Grammars) -> None:
    served = Served(grammars, CALL)
    for body in ({"tools": TOOLS}, {"tools": STRICT, "tool_choice": "none"}, {}):
        served.ask(**body)
        assert served.engine.submitted[-1].sampling.grammar == ""


def test_calls_behind_reasoning(grammars: Grammars) -> None:
    served = Served(grammars, f"<think>so</think>{CALL}", **THINKS)
    assert served.ask(tools=TOOLS, tool_choice="required")["message"]["reasoning"] == "so"
    assert served.allows(f"<think>so</think>{CALL}", CALL, "<think>so</think>Paris.") == [True, True, False]


# --- forms ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_prompt", [False, True])
@pytest.mark.parametrize("form", [JSON, {"guided_grammar": 'start: "{" "}"'}, {"guided_choice": ["{}", "[]"]}])
def test_a_form_behind_reasoning(grammars: Grammars, form: dict[str, Any], in_prompt: bool) -> None:
    thought = ("" if in_prompt else "<think>") + "A {brace}?</think>\n\n"
    served = Served(grammars, thought + "{}", **THINKS)
    choice = served.ask(chat_template_kwargs={"thinks": in_prompt}, **form)
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("{}", "A {brace}?")
    assert served.allows(thought + "{}", thought + "Paris.", thought) == [True, False, False]
    assert served.allows("{}") == [not in_prompt]


def test_a_form_without_tools(grammars: Grammars) -> None:
    served = Served(grammars, "{}")
    served.ask(tools=TOOLS, tool_choice="none", **JSON)
    assert served.allows("{}", CALL) == [True, False]


# --- what is refused --------------------------------------------------------------------------------------------------


def test_what_does_not_go_together(grammars: Grammars) -> None:
    served = Served(grammars, "x")
    for tools in (TOOLS, STRICT):
        assert served.refused(tools=tools, **JSON) == ("response_format", "unsupported_parameter")
    named = {"tool_choice": NAMED, "guided_choice": ["a"]}
    assert served.refused(tools=TOOLS, **named) == ("guided_choice", "unsupported_parameter")


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "a**"}}},
    ],
)
def test_strict_schemas_that_cannot_be_followed(grammars: Grammars, parameters: dict[str, Any]) -> None:
    body = {"tools": [tool("f", parameters=parameters, strict=True)]}
    param, code = Served(grammars, "x").refused(**body)
    assert (param.partition("[")[0], code) == ("tools", "invalid_value")
    message = Served(grammars, "x").api.post(ROUTE, {"messages": HELLO, **body}).json()["error"]["message"]
    assert "args_0" not in message, "our own grammar is nobody's business"
    # Not promised, not refused.
    Served(grammars, OTHER).ask(tools=[tool("f", parameters=parameters)], tool_choice="required")


def test_strict_in_a_style_without_json(grammars: Grammars) -> None:
    assert Served(grammars, "x", style="pythonic").refused(tools=STRICT) == ("tools", "unsupported_parameter")
    served = Served(grammars, '[weather(city="Paris")]', style="pythonic")
    assert served.ask(tools=TOOLS, tool_choice="required")["finish_reason"] == "tool_calls"
    assert served.allows('[weather(city="Paris")]', "Paris.") == [True, False]


def test_choices_have_matchers_of_their_own(grammars: Grammars) -> None:
    def script(_prompt: Any, choice: int) -> Line:
        return Line([*ids_of([CALL, OTHER][choice]), EOS_ID])

    served = Served(grammars, CALL)
    served.engine._script = script
    response = served.api.post(ROUTE, {"messages": HELLO, "tools": TOOLS, "tool_choice": "required", "n": 2})
    names = [choice["message"]["tool_calls"][0]["function"]["name"] for choice in response.json()["choices"]]
    assert names == ["weather", "f"]
