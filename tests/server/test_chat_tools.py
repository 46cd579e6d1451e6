"""Tools and reasoning in chat completions, end to end but for the engine: whole and streamed, with OpenAI's own types
and its own way of putting a stream together."""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import msgspec
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from server.chat_template import ChatTemplate
from server.reasoning.styles import REASONING_STYLES
from server.services import Services
from server.tokenizer import Tokenizer
from server.tools.styles import TOOL_STYLES
from tests.models import EOS_ID, build_tokenizer
from tests.server.completion_calls import events
from tests.server.fakes import MODEL, Api, FakeEngine, Line, Script, application, ids_of, services, tokenizer

ROUTE = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}<turn>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<turn>assistant\n{% if thinks %}<think>\n{% endif %}{% endif %}"
)


LONG_MODEL = msgspec.structs.replace(MODEL, max_model_len=1024)


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


TOOLS = [tool("f"), tool("get_weather", parameters={"type": "object", "properties": {"city": {"type": "string"}}})]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "x"]}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def say(text: str) -> Script:
    """Token by token, with an ending token."""
    return lambda _prompt, _choice: Line([*ids_of(text), EOS_ID])


def cut_off(text: str) -> Script:
    return lambda _prompt, _choice: Line(ids_of(text), "length")


def given_services(engine: FakeEngine, style: str | None = "hermes", **changes: Any) -> Services:
    return services(
        engine,
        **{
            "chat_template": ChatTemplate(changes.get("tokenizer", tokenizer()), TEMPLATE),
            "model": LONG_MODEL,
            "tool_style": None if style is None else TOOL_STYLES[style],
            **changes,
        },
    )


def chat(script: Script, body: dict[str, Any], *, per_event: int = 1, **changes: Any) -> dict[str, Any]:
    """A whole answer, after it has been compared with the streamed one, as OpenAI's client puts that together."""
    body = {"messages": HELLO, "tools": TOOLS, **body}
    engine = FakeEngine(script, tokens_per_event=per_event)
    client = Api(given_services(engine, **changes))
    response = client.post(ROUTE, body)
    assert response.status_code == 200, response.text
    whole: dict[str, Any] = response.json()
    ChatCompletion.model_validate(whole, strict=True)
    chunks = events(client.post(ROUTE, {**body, "stream": True, "stream_options": {"include_usage": True}}))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    assert chunks[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert put_together(parts) == without_ids(choice["message"])
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [choice["finish_reason"]]
        entries = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
        assert entries == (choice["logprobs"] or {"content": []})["content"]
    return whole


def put_together(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """A message made of a choice's deltas, which are checked one by one."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
    calls: list[dict[str, Any]] = []
    assert parts[0]["delta"] == {"role": "assistant", "content": ""}
    assert parts[-1]["delta"] == {}
    for part in parts[1:-1]:
        delta = part["delta"]
        if "tool_calls" in delta:
            assert set(delta) == {"tool_calls"}
            add_call_delta(calls, delta["tool_calls"])
            continue
        assert set(delta) in ({"content"}, {"reasoning_content", "reasoning"})
        for key, text in delta.items():
            assert text or part["logprobs"], "an empty delta"
            message[key] = message.get(key, "") + text
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    return message


def add_call_delta(calls: list[dict[str, Any]], deltas: list[dict[str, Any]]) -> None:
    (delta,) = deltas
    if delta["index"] == len(calls):
        assert set(delta) == {"index", "id", "type", "function"}
        assert delta["function"]["arguments"] == ""
        assert delta["id"]
        calls.append({"type": delta["type"], "function": dict(delta["function"])})
    else:
        assert set(delta) == {"index", "function"}
        assert set(delta["function"]) == {"arguments"}
        assert delta["function"]["arguments"]
        assert delta["index"] == len(calls) - 1
        calls[-1]["function"]["arguments"] += delta["function"]["arguments"]


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """The stream's are others."""
    calls = message.get("tool_calls", [])
    assert len({call["id"] for call in calls}) == len(calls)
    if not calls:
        return message
    return {**message, "tool_calls": [{key: call[key] for key in ("type", "function")} for call in calls]}


def function(name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize("per_event", [1, 3, 1000])
def test_calls(per_event: int) -> None:
    (choice,) = chat(say(f"Let me see.\n{CALL}\n{OTHER}\n"), {}, per_event=per_event)["choices"]
    assert without_ids(choice["message"]) == {
        "role": "assistant",
        "content": "Let me see.",
        "refusal": None,
        "tool_calls": [function("f", '{"a": [1, "x"]}'), function("get_weather", '{"city": "Paris"}')],
    }
    assert choice["finish_reason"] == "tool_calls"


def test_only_a_call() -> None:
    (choice,) = chat(say(CALL), {})["choices"]
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["id"].startswith("call_")


def test_one_call_at_most() -> None:
    (choice,) = chat(say(f"{CALL}\n{OTHER}"), {"parallel_tool_calls": False})["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["f"]
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("text", ["  It is <tool_call> they mean.\n", "<tool_call>{}</tool_call>", " \n", ""])
def test_no_call(text: str) -> None:
    (choice,) = chat(say(text), {})["choices"]
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert choice["finish_reason"] == "stop"


def test_a_call_that_is_cut_off() -> None:
    (choice,) = chat(cut_off(CALL.partition('"x"')[0]), {})["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": [1, '


def test_several_choices() -> None:
    def script(_prompt: Any, choice: int) -> Line:
        return Line([*ids_of([CALL, "Paris.", f"{OTHER}{CALL}"][choice]), EOS_ID])

    choices = chat(script, {"n": 3})["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["tool_calls", "stop", "tool_calls"]
    assert [len(choice["message"].get("tool_calls", [])) for choice in choices] == [1, 0, 2]


def test_logprobs_are_whole() -> None:
    (choice,) = chat(say(f"Well.{CALL}"), {"logprobs": True})["choices"]
    tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert "".join(tokens) == f"Well.{CALL}<eos>"


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("llama3_json", '{"name": "f", "parameters": {"a": [1, "x"]}}'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": [1, "x"]}'),
        ("pythonic", '[f(a=[1, "x"])]'),
    ],
)
def test_other_styles(style: str, text: str) -> None:
    (choice,) = chat(say(text), {}, style=style)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("f", {"a": [1, "x"]})
    if style == "mistral":  # its templates refuse other ids
        assert len(call["id"]) == 9
        assert call["id"].isalnum()


def prompt_of(body: dict[str, Any], **changes: Any) -> str:
    engine = FakeEngine(say("x"))
    response = Api(given_services(engine, **changes)).post(ROUTE, body)
    assert response.status_code == 200, response.text
    return tokenizer().decode([int(each) for each in engine.submitted[0].prompt.token_ids], skip_special_tokens=False)


def test_what_the_template_is_told() -> None:
    assert prompt_of({"messages": HELLO, "tools": TOOLS}).startswith("[f][get_weather]<turn>user")
    assert prompt_of({"messages": HELLO, "tools": TOOLS, "tool_choice": "none"}).startswith("<turn>user")
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    history = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "so"},
        {"role": "tool", "tool_call_id": "call_1", "content": "5"},
    ]
    assert prompt_of({"messages": history}) == (
        '<turn>user\nhello<turn>assistant\n<think>so</think>f{"a": 1}<turn>tool\n5<turn>assistant\n'
    )


def test_tokenize_and_render_know_tools() -> None:
    client = Api(given_services(FakeEngine(say("x"))))
    body = {"messages": HELLO, "tools": TOOLS}
    rendered = client.post(f"{ROUTE}/render", body).json()
    assert rendered["prompt"].startswith("[f][get_weather]<turn>")
    assert client.post("/tokenize", body).json()["tokens"] == rendered["token_ids"]


@pytest.mark.parametrize(
    ("body", "changes", "param", "code"),
    [
        ({"tools": [tool("a b")]}, {}, "tools[0].function.name", "invalid_value"),
        ({"parallel_tool_calls": 1}, {}, "parallel_tool_calls", "invalid_value"),
        ({}, {"style": None}, "tools", "unsupported_parameter"),
        ({}, {"chat_template": ChatTemplate(tokenizer())}, "tools", "unsupported_parameter"),
        ({"functions": [{"name": "f"}]}, {}, "functions", "unsupported_parameter"),
        ({"messages": [{"role": "function", "content": "x"}]}, {}, "messages[0].role", "unsupported_parameter"),
    ],
)
def test_bad_requests(body: dict[str, Any], changes: dict[str, Any], param: str, code: str) -> None:
    engine = FakeEngine(say("x"))
    response = Api(given_services(engine, **changes)).post(ROUTE, {"messages": HELLO, "tools": TOOLS, **body})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, code)
    assert not engine.submitted


# --- special tokens ---------------------------------------------------------------------------------------------------


@functools.cache
def marked_tokenizer() -> Tokenizer:
    """A tokenizer whose markers are special tokens."""
    own = build_tokenizer()
    own.add_special_tokens({"additional_special_tokens": ["<turn>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>"]})
    return Tokenizer(own)


def say_marked(text: str) -> Script:
    ids = marked_tokenizer().transformers.backend_tokenizer.encode(text, add_special_tokens=False).ids
    return lambda _prompt, _choice: Line([*ids, EOS_ID])


@pytest.mark.parametrize(
    ("text", "content", "num_calls"),
    [
        ('Hm.[TOOL_CALLS]f[ARGS]{"a": 1}', "Hm.", 1),
        ("Hm.[TOOL_CALLS]or not<turn>", "Hm.or not", 0),
        ("a[ARGS]b</think>c<turn>", "abc", 0),
    ],
)
def test_markers_that_are_special_tokens(text: str, content: str, num_calls: int) -> None:
    options: dict[str, Any] = {"tokenizer": marked_tokenizer(), "reasoning_style": REASONING_STYLES["qwen3"]}
    (choice,) = chat(say_marked(text), {}, style="mistral", **options)["choices"]
    assert choice["message"]["content"] == content
    assert len(choice["message"].get("tool_calls", [])) == num_calls
    if not num_calls:
        (choice,) = chat(say_marked(text), {"tools": None}, style="mistral", **options)["choices"]
        assert choice["message"]["content"] == content


# --- reasoning --------------------------------------------------------------------------------------------------------

THINKS: dict[str, Any] = {"reasoning_style": REASONING_STYLES["qwen3"]}


@pytest.mark.parametrize("per_event", [1, 4, 1000])
@pytest.mark.parametrize("in_prompt", [False, True])
def test_reasoning(in_prompt: bool, per_event: int) -> None:
    thought = "The question is\nin the answer."
    text = ("" if in_prompt else "<think>\n") + f"{thought}\n</think>\n\n"
    body = {"chat_template_kwargs": {"thinks": in_prompt}}
    answer = chat(say(f"{text}Paris.\n{CALL}"), body, per_event=per_event, **THINKS)
    (choice,) = answer["choices"]
    assert without_ids(choice["message"]) == {
        "role": "assistant",
        "content": "Paris.",
        "refusal": None,
        "reasoning_content": thought,
        "reasoning": thought,
        "tool_calls": [function("f", '{"a": [1, "x"]}')],
    }
    # Tokens that begin within the reasoning's text, markers included.
    reasoning, end = 0, len(text.rstrip())
    for token_id in ids_of(f"{text}Paris.\n{CALL}"):
        if end <= 0:
            break
        reasoning += 1
        end -= len(tokenizer().vocabulary.bytes_of(token_id).decode())
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": reasoning}


def test_reasoning_that_is_cut_off() -> None:
    answer = chat(cut_off("<think>The question"), {"tools": None}, **THINKS)
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("", "The question")
    assert choice["finish_reason"] == "length"
    tokens = answer["usage"]["completion_tokens"]
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": tokens}


def test_reasoning_that_nobody_wants_to_see() -> None:
    (choice,) = chat(say("<think>x</think>Paris."), {"include_reasoning": False}, **THINKS)["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Paris.", "refusal": None}


def test_no_reasoning() -> None:
    answer = chat(say(" Paris."), {"tools": None}, **THINKS)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": " Paris.", "refusal": None}
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_an_answer_that_is_continued() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "<think>Well,"}]
    body = {"messages": messages, "continue_final_message": True, "tools": None}
    (choice,) = chat(say(" so.</think>Paris."), body, **THINKS)["choices"]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("so.", "Paris.")


# --- whole and streamed -----------------------------------------------------------------------------------------------

WORDS = [
    "<think>", "</think>", CALL, OTHER, "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {', "}", '"', " ",
    "Paris", "\n", "é🫠", "<",
]  # fmt: skip


@settings(max_examples=25)
@given(st.lists(st.sampled_from(WORDS), max_size=8).map("".join), st.integers(1, 9), st.booleans())
def test_a_stream_adds_up_to_the_whole(text: str, per_event: int, parallel: bool) -> None:
    chat(cut_off(text), {"parallel_tool_calls": parallel}, per_event=per_event, **THINKS)


class _App(httpx.AsyncBaseTransport):
    """OpenAI's client on an application in the same process."""

    def __init__(self, given: Services) -> None:
        self._inner = httpx.ASGITransport(application(given))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await self._inner.handle_async_request(request)


@pytest.fixture
def openai_client() -> Iterator[openai.AsyncOpenAI]:
    engine = FakeEngine(say(f"<think>so</think>Well.{CALL}{OTHER}"))
    transport = _App(given_services(engine, **THINKS))
    http: Any = httpx.AsyncClient(transport=transport, base_url="http://test")
    yield openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http, max_retries=0)


def test_openais_own_stream_helper(openai_client: openai.AsyncOpenAI) -> None:
    import asyncio

    async def run() -> Any:
        async with (
            openai_client,
            openai_client.chat.completions.stream(model="tiny", messages=HELLO, tools=TOOLS) as stream,  # type: ignore[arg-type]
        ):
            seen = [event async for event in _events_of(stream)]
            return seen, await stream.get_final_completion()

    seen, final = asyncio.run(run())
    message = final.choices[0].message
    assert [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls] == [
        ("f", {"a": [1, "x"]}),
        ("get_weather", {"city": "Paris"}),
    ]
    assert (message.content, final.choices[0].finish_reason) == ("Well.", "tool_calls")
    done = [event for event in seen if event.type == "tool_calls.function.arguments.done"]
    assert [event.name for event in done] == ["f", "get_weather"]


async def _events_of(stream: Any) -> AsyncIterator[Any]:
    async for event in stream:
        yield event
