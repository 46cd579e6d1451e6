"""POST /v1/responses, end to end but for the engine: whole and streamed, checked with OpenAI's own types."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.messages import GetRecord, GetTurns, decode_to_runner
from server.answer_memory import AnswerMemory
from server.chat_template import ChatTemplate
from server.conversation import MAX_MESSAGES
from server.errors import QueueFull
from server.grammars import Grammars
from server.questions import Questions, Replied
from server.reasoning.styles import REASONING_STYLES
from server.request_context import RequestContext, current_request
from server.responses.items import MAX_PARTS
from server.responses.store import ResponseStore
from tests.models import EOS_ID, VOCAB_SIZE
from tests.server.fakes import Api, FakeEngine, Line, RecordsHarness, application, ids_of, tokenizer
from tests.server.response_events import ROUTE, check_response, events_of, given_services, put_together, respond
from tests.server.test_chat_tools import CALL, OTHER, WORDS, cut_off, say

FUNCTIONS: list[dict[str, Any]] = [
    {"type": "function", "name": "f"},
    {
        "type": "function",
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": None,
    },
]
THINKS: dict[str, Any] = {"reasoning_style": REASONING_STYLES["qwen3"]}
USER = {"role": "user", "content": "hello"}


def shape(response: dict[str, Any]) -> list[tuple[str, str]]:
    """Each item's type and what is in it."""
    return [
        (item["type"], item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        for item in response["output"]
    ]


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_event", [1, 3, 1000])
def test_text(per_event: int) -> None:
    response = respond(say("Good day to you."), {}, per_event=per_event)
    assert shape(response) == [("message", "Good day to you.")]
    (item,) = response["output"]
    assert (item["role"], item["status"]) == ("assistant", "completed")
    assert item["content"][0]["annotations"] == []
    assert (response["status"], response["error"], response["incomplete_details"]) == ("completed", None, None)
    # The fake engine says that it has found two tokens of every prompt in its cache.
    usage = response["usage"]
    assert usage["output_tokens"] == len(ids_of("Good day to you.")) + 1
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens_details"] == {"cached_tokens": 2, "cache_write_tokens": 0}


def test_an_answer_of_nothing() -> None:
    assert shape(respond(say(""), {})) == [("message", "")]


def test_an_answer_that_is_cut_off() -> None:
    response = respond(say("Good day to you."), {"max_output_tokens": 3})
    assert (response["status"], response["completed_at"]) == ("incomplete", None)
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"
    assert (response["usage"]["output_tokens"], response["max_output_tokens"]) == (3, 3)


@pytest.mark.parametrize("per_event", [1, 4, 1000])
def test_reasoning_text_and_calls(per_event: int) -> None:
    said = f"<think>\nThe question.\n</think>\n\nLet me see.\n{CALL}\n{OTHER}\n"
    response = respond(say(said), {"tools": FUNCTIONS}, per_event=per_event, **THINKS)
    assert shape(response) == [
        ("reasoning", "The question."),
        ("message", "Let me see."),
        ("function_call", '{"a": [1, "x"]}'),
        ("function_call", '{"city": "Paris"}'),
    ]
    reasoning, _, *calls = response["output"]
    assert reasoning["content"][0]["type"] == "reasoning_text"
    assert reasoning["summary"] == []
    assert [call["name"] for call in calls] == ["f", "get_weather"]
    assert all(call["id"].startswith("fc_") and call["call_id"].startswith("call_") for call in calls)
    assert response["status"] == "completed"
    assert 0 < response["usage"]["output_tokens_details"]["reasoning_tokens"] < response["usage"]["output_tokens"]


def test_a_call_that_is_cut_off() -> None:
    response = respond(cut_off(CALL.partition('"x"')[0]), {"tools": FUNCTIONS})
    assert shape(response) == [("function_call", '{"a": [1, ')]
    assert (response["status"], response["output"][0]["status"]) == ("incomplete", "incomplete")


def test_reasoning_that_is_cut_off() -> None:
    response = respond(cut_off("<think>The question"), {}, **THINKS)
    assert shape(response) == [("reasoning", "The question")]
    usage = response["usage"]
    assert usage["output_tokens_details"]["reasoning_tokens"] == usage["output_tokens"]


def test_one_call_at_most() -> None:
    response = respond(say(f"{CALL}\n{OTHER}"), {"tools": FUNCTIONS, "parallel_tool_calls": False})
    assert [item["name"] for item in response["output"]] == ["f"]
    assert response["parallel_tool_calls"] is False


@settings(max_examples=25)
@given(st.lists(st.sampled_from(WORDS), max_size=8).map("".join), st.integers(1, 9))
def test_a_stream_adds_up_to_the_whole(text: str, per_event: int) -> None:
    respond(cut_off(text), {"tools": FUNCTIONS}, per_event=per_event, **THINKS)


@pytest.mark.parametrize("body", [{"include": ["message.output_text.logprobs"]}, {"top_logprobs": 2}])
@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("per_event", [1, 1000])
def test_logprobs(body: dict[str, Any], thinks: bool, per_event: int) -> None:
    text = "<think>so</think>" if thinks else ""
    response = respond(say(f"{text}Good day."), body, per_event=per_event, **(THINKS if thinks else {}))
    entries = response["output"][-1]["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in entries) == "Good day.<eos>"
    assert {len(entry["top_logprobs"]) for entry in entries} == {body.get("top_logprobs", 0)}


# --- what the model gets to see ---------------------------------------------------------------------------------------


def prompt_of(body: dict[str, Any], **changes: Any) -> str:
    engine = FakeEngine(say("x"))
    response = Api(given_services(engine, **changes)).post(ROUTE, body)
    assert response.status_code == 200, response.text
    return tokenizer().decode([int(each) for each in engine.submitted[0].prompt.token_ids], skip_special_tokens=False)


def test_the_prompt() -> None:
    assert prompt_of({"input": "hello"}) == "<turn>user\nhello<turn>assistant\n"
    given = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"role": "user", "content": "one"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "two", "annotations": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "call_2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "5"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "6"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "in short"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]
    assert prompt_of({"input": given, "instructions": "Be kind."}) == (
        "<turn>system\nBe kind.<turn>system\nBe brief.<turn>user\none"
        '<turn>assistant\n<think>so</think>twof{"a": 1}g{}<turn>tool\n5<turn>tool\n6'
        "<turn>assistant\n<think>in short</think>no<turn>assistant\n"
    )


def test_the_prompt_has_the_tools_that_may_be_called() -> None:
    both = {"input": "hello", "tools": FUNCTIONS}
    assert prompt_of(both).startswith("[f][get_weather]<turn>")
    assert prompt_of({**both, "tool_choice": "none"}).startswith("<turn>")
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_weather"}]}
    assert prompt_of({**both, "tool_choice": allowed}).startswith("[get_weather]<turn>")
    assert prompt_of({"input": "x", "chat_template_kwargs": {"thinks": True}}).endswith("<think>\n")


def test_what_was_asked_for_is_told(grammars: Grammars) -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object", "x": 1}, "strict": False}
    asked = {
        "instructions": "Be kind.",
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "top_p": 0.25,
        "max_tool_calls": 3,
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "tools": FUNCTIONS,
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        "user": "u",
        "prompt_cache_key": "k",
        "service_tier": "auto",
        "truncation": "disabled",
        "background": False,
    }
    response = respond(say("x"), asked)
    for name in ("instructions", "metadata", "temperature", "top_p", "max_tool_calls", "text", "tool_choice"):
        assert response[name] == asked[name], name
    assert response["reasoning"] == {"effort": "low", "summary": None}
    assert response["tools"] == [
        {"type": "function", "name": "f", "description": None, "parameters": {}, "strict": False},
        {**FUNCTIONS[1], "strict": False},
    ]
    given = respond(say("{}"), {"text": {"format": form}}, grammars=grammars)
    assert given["text"] == {"format": form}
    assert (given["instructions"], given["tool_choice"], given["temperature"]) == (None, "auto", 1.0)


def test_parameters_reach_the_engine() -> None:
    engine = FakeEngine(say("x"))
    body = {"input": "x", "max_output_tokens": 7, "temperature": 0.5, "top_p": 0.25, "top_k": 3, "seed": 5}
    more = {"min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5, "cache_salt": "s"}
    limits = {"min_tokens": 2, "stop_token_ids": [9], "ignore_eos": True, "logit_bias": {"5": 1}}
    response = Api(given_services(engine)).post(ROUTE, {**body, **more, **limits, "stop": "zz"})
    assert response.status_code == 200, response.text
    (sent,) = engine.submitted
    sampling = sent.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.temperature, sampling.top_p) == (7, 2, 0.5, 0.25)
    assert (sampling.top_k, sampling.seed, sampling.min_p, sent.cache_salt) == (3, 5, 0.1, "s")
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.5)
    assert (sampling.stop_token_ids, sampling.logit_bias) == ((9,), ((5, 1.0),))


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(tokenizer(), VOCAB_SIZE)
    yield made
    made.close()


def test_forms_and_demanded_calls_become_grammars(grammars: Grammars) -> None:
    def grammar_of(**body: Any) -> str:
        engine = FakeEngine(say("x"))
        response = Api(given_services(engine, grammars=grammars)).post(ROUTE, {"input": "x", **body})
        assert response.status_code == 200, response.text
        return engine.submitted[0].sampling.grammar

    assert grammar_of() == grammar_of(text={"format": {"type": "text"}}) == ""
    schema = {"type": "object", "properties": {"zebra": {"type": "integer"}}, "required": ["zebra"]}
    assert "zebra" in grammar_of(text={"format": {"type": "json_schema", "name": "n", "schema": schema}})
    assert grammar_of(text={"format": {"type": "json_object"}})
    assert "yes" in grammar_of(structured_outputs={"choice": ["yes", "no"]})
    assert grammar_of(tools=FUNCTIONS) == ""
    required = grammar_of(tools=FUNCTIONS, tool_choice="required")
    assert "get_weather" in required
    named = grammar_of(tools=FUNCTIONS, tool_choice={"type": "function", "name": "f"})
    assert named
    assert "get_weather" not in named
    assert grammar_of(tools=[{**FUNCTIONS[1], "strict": True}])


# --- conversations and the store --------------------------------------------------------------------------------------


def test_a_conversation() -> None:
    answers = iter([f"<think>hm</think>Let me.{CALL}", "Five.", "Bye."])
    engine = FakeEngine(lambda _prompt, _choice: Line([*ids_of(next(answers)), EOS_ID]))
    client = Api(given_services(engine, **THINKS))
    first = client.post(ROUTE, {"input": "one", "instructions": "Be kind.", "tools": FUNCTIONS}).json()
    call = first["output"][-1]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "5"}
    second = client.post(ROUTE, {"input": [output], "previous_response_id": first["id"]}).json()
    assert second["previous_response_id"] == first["id"]
    third = client.post(ROUTE, {"input": "two", "previous_response_id": second["id"], "stream": True})
    assert events_of(third)[-1]["type"] == "response.completed"
    prompt = tokenizer().decode(
        [int(each) for each in engine.submitted[-1].prompt.token_ids], skip_special_tokens=False
    )
    # The first request's instructions and tools were for that one only.
    assert prompt == (
        '<turn>user\none<turn>assistant\n<think>hm</think>Let me.f{"a": [1, "x"]}<turn>tool\n5'
        "<turn>assistant\nFive.<turn>user\ntwo<turn>assistant\n"
    )
    assert client.get(f"{ROUTE}/{second['id']}").json() == check_response(second)
    # Without the first one there is no conversation any more, but the second is still there.
    assert client.delete(f"{ROUTE}/{first['id']}").json() == {
        "id": first["id"],
        "object": "response",
        "deleted": True,
    }
    assert client.get(f"{ROUTE}/{second['id']}").status_code == 200
    refused = client.post(ROUTE, {"input": "two", "previous_response_id": second["id"]})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "previous_response_not_found"


def test_what_is_not_kept() -> None:
    client = Api(given_services(FakeEngine(say("x"))))
    response = client.post(ROUTE, {"input": "x", "store": False}).json()
    assert response["store"] is False
    for answer in (
        client.get(f"{ROUTE}/{response['id']}"),
        client.delete(f"{ROUTE}/{response['id']}"),
        client.post(f"{ROUTE}/{response['id']}/cancel"),
        client.get(f"{ROUTE}/{'x' * 1000}"),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


def test_a_conversation_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Api(given_services(FakeEngine(say("x"))))
    first = client.post(ROUTE, {"input": "x" * 50}).json()["id"]
    again = {"input": "y", "previous_response_id": first}
    monkeypatch.setattr("server.responses.routes._INLINE_BYTES", 0)
    assert client.post(ROUTE, again).status_code == 200
    monkeypatch.setattr("server.responses.store.MAX_CONVERSATION_BYTES", 50)
    refused = client.post(ROUTE, again)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "previous_response_id")


def test_a_response_that_is_too_large_to_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.responses.routes.MAX_RESPONSE_BYTES", 100)
    client = Api(given_services(FakeEngine(say("x"))))
    small, large = (client.post(ROUTE, {"input": "x" * size}).json() for size in (10, 100))
    assert (small["store"], large["store"]) == (True, False)
    assert client.get(f"{ROUTE}/{large['id']}").status_code == 404


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_becomes_too_large_to_be_kept_says_so(stream: bool) -> None:
    records = RecordsHarness(max_record_bytes=2000)
    client = Api(given_services(FakeEngine(say("Good day. " * 50)), responses=records.responses))
    answer = client.post(ROUTE, {"input": "x", "stream": stream})
    if stream:
        events = events_of(answer)
        assert events[0]["response"]["store"] is True
        response = events[-1]["response"]
    else:
        response = check_response(answer.json())
    assert (response["status"], response["store"]) == ("completed", False)
    assert len(records.store) == 0


def test_a_runner_that_keeps_nothing_does_not_spoil_the_answer() -> None:
    full: Questions[Replied] = Questions(lambda *_: False, lambda: None)
    client = Api(given_services(FakeEngine(say("Good day.")), responses=ResponseStore(0, full)))
    response = check_response(client.post(ROUTE, {"input": "x"}).json())
    assert (response["status"], response["store"]) == ("completed", False)
    for answer in (client.get(f"{ROUTE}/x"), client.post(ROUTE, {"input": "x", "previous_response_id": "x"})):
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")


def test_a_response_that_has_ended_cannot_be_cancelled() -> None:
    client = Api(given_services(FakeEngine(say("x"))))
    response = client.post(ROUTE, {"input": "x"}).json()
    refused = client.post(f"{ROUTE}/{response['id']}/cancel")
    assert refused.status_code == 400
    for name in ("stream=true", "starting_after=5"):
        refused = client.get(f"{ROUTE}/{response['id']}?{name}")
        assert refused.json()["error"]["code"] == "unsupported_parameter"
    assert client.get(f"{ROUTE}/{response['id']}?stream=false").status_code == 200


# --- errors -----------------------------------------------------------------------------------------------------------


def test_an_engine_that_fails() -> None:
    client = Api(given_services(FakeEngine(say("Good day to you."), fail_after=3)))
    whole = client.post(ROUTE, {"input": "x"})
    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "engine_failed")
    events = events_of(client.post(ROUTE, {"input": "x", "stream": True}))
    last = events[-1]
    assert last["type"] == "response.failed"
    failed = last["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    assert failed["output"][0]["status"] == "incomplete"
    assert failed["output"][0]["content"][0]["text"]
    assert client.get(f"{ROUTE}/{failed['id']}").status_code == 404


def test_a_fault_of_ours_in_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("secret")

    monkeypatch.setattr("server.responses.create.ResponseAnswer.feed", broken)
    last = events_of(Api(given_services(FakeEngine(say("x")))).post(ROUTE, {"input": "x", "stream": True}))[-1]
    assert last["type"] == "response.failed"
    assert "secret" not in json.dumps(last)


def test_a_full_queue() -> None:
    client = Api(given_services(FakeEngine(say("x"), refuse=[QueueFull("full")])))
    response = client.post(ROUTE, {"input": "x", "stream": True})
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")


def test_the_input_that_responses_hold_until_they_end_is_bounded() -> None:
    given = given_services(FakeEngine(say("x")), answer_memory=AnswerMemory(3000))
    client, asked = Api(given), {"input": "x" * 600, "background": True}
    given.answer_memory.used = 2500  # others'
    refused = client.post(ROUTE, asked)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert given.answer_memory.used == 2500
    given.answer_memory.used = 0
    assert client.post(ROUTE, asked).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_what_responses_tell_of_their_requests_is_bounded_too(stream: bool) -> None:
    """A description of which the model is not told costs no token, and is held until its response ends."""
    engine, memory = FakeEngine(say("x")), AnswerMemory(400_000)
    app = within_request(application(given_services(engine, answer_memory=memory)))
    tools = [{"type": "function", "name": "f", "description": "x" * 100_000}]

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.post(
                ROUTE, json={"input": "x", "tools": tools, "tool_choice": "none", "stream": stream}
            )

    assert asyncio.run(ask()).status_code == 200
    assert memory.used == 0
    memory.used = 200_000  # others'
    assert asyncio.run(ask()).status_code == 429
    assert memory.used == 200_000


class WaitingHarness(RecordsHarness):
    """Sends nothing that is large before it is told to. `asked`: for how much, each time."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []
        self.waiting: list[tuple[bytes | memoryview, ...]] = []

    def _send(self, *frames: bytes | memoryview) -> bool:
        message = decode_to_runner(frames[0])
        if isinstance(message, GetTurns | GetRecord):
            self.asked.append(message.max_bytes)
            if message.max_bytes > 40_000:
                self.waiting.append(frames)
                return True
        return super()._send(*frames)

    def go_on(self) -> None:
        for frames in self.waiting:
            super()._send(*frames)


@pytest.mark.parametrize("what", ["conversation", "body"])
def test_a_large_response_is_not_held_for_as_many_as_ask_for_it(what: str) -> None:
    """Each gets a copy. What there is no room for is not sent by the runner; and it is given back."""
    records, size = WaitingHarness(), 50_000
    memory = AnswerMemory(5 * size if what == "conversation" else 2 * size)
    given = given_services(FakeEngine(say("x")), responses=records.responses, answer_memory=memory)
    given = replace(given, model=msgspec.structs.replace(given.model, max_model_len=1 << 17))
    input, instructions = ("x" * size, "") if what == "conversation" else ("x", "x" * size)
    kept = Api(given).post(ROUTE, {"input": input, "instructions": instructions}).json()["id"]
    assert memory.used == 0

    async def main() -> None:
        transport = httpx.ASGITransport(within_request(application(given)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

            def ask() -> asyncio.Task[httpx.Response]:
                if what == "body":
                    return asyncio.create_task(client.get(f"{ROUTE}/{kept}"))
                body = {"input": "y", "previous_response_id": kept, "store": False}
                return asyncio.create_task(client.post(ROUTE, json=body))

            first = ask()
            while not records.waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            refused = await ask()
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert len(records.waiting) == 1
            records.go_on()
            assert (await first).status_code == 200

    asyncio.run(main())
    assert memory.used == 0
    assert max(records.asked) in range(size, size + 1000)


def within_request(app: Any) -> Any:
    """As the outermost middleware does it."""

    async def call(scope: Any, receive: Any, send: Any) -> None:
        context = RequestContext("")
        token = current_request.set(context)
        try:
            await app(scope, receive, send)
        finally:
            current_request.reset(token)
            context.end()

    return call


def content(part: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [part]}]}


def item(**members: Any) -> dict[str, Any]:
    return {"input": [USER, members]}


DEEP: Any = {}
for _ in range(100):
    DEEP = {"properties": {"x": DEEP}}
FUNCTION = {"type": "function", "name": "f"}
CALLED = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
INVALID: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": {}}, "input"),
    ({"input": [USER] * (MAX_MESSAGES + 1)}, "input"),
    ({"input": "9" * 1_000_000}, "input"),
    ({"input": [5]}, "input[0]"),
    ({"input": [{}]}, "input[0].type"),
    ({"input": [{"type": 5}]}, "input[0].type"),
    ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": [], "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
    (content(5), "input[0].content[0]"),
    (content({"text": "x"}), "input[0].content[0].type"),
    (content({"type": "input_text"}), "input[0].content[0].text"),
    (item(**{**CALLED, "call_id": ""}), "input[1].call_id"),
    (item(**{**CALLED, "call_id": "x" * 257}), "input[1].call_id"),
    (item(**{**CALLED, "name": "x" * 65}), "input[1].name"),
    (item(**{**CALLED, "arguments": {}}), "input[1].arguments"),
    (item(type="function_call_output", output="x"), "input[1].call_id"),
    (item(type="function_call_output", call_id="c", output=5), "input[1].output"),
    (item(type="reasoning", summary="x"), "input[1].summary"),
    ({"input": [CALLED] * 129}, "input"),
    ({"instructions": 5}, "instructions"),
    ({"model": 5}, "model"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 1.0}, "max_output_tokens"),
    ({"max_output_tokens": 1024}, "input"),
    ({"min_tokens": 6, "max_output_tokens": 5}, "min_tokens"),
    ({"temperature": 2.1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"include": "x"}, "include"),
    ({"include": ["everything"]}, "include.0"),
    ({"include": ["message.output_text.logprobs"] * 17}, "include"),
    ({"metadata": {str(each): "x" for each in range(17)}}, "metadata"),
    ({"metadata": {"x" * 65: "x"}}, "metadata." + "x" * 65),
    ({"metadata": {"x": "x" * 513}}, "metadata.x"),
    ({"metadata": {"x": 5}}, "metadata.x"),
    ({"store": 1}, "store"),
    ({"previous_response_id": ""}, "previous_response_id"),
    ({"previous_response_id": "x" * 129}, "previous_response_id"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"reasoning": {"effort": "very"}}, "reasoning.effort"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {}}, "stream_options"),
    ({"stop": [""]}, "stop.0"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"text": "x"}, "text"),
    ({"text": {"verbosity": "x"}}, "text.verbosity"),
    ({"text": {"format": 5}}, "text.format"),
    ({"text": {"format": {"type": "poem"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "king"}}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "n", "schema": DEEP}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "n", "strict": 1}}}, "text.format.strict"),
    ({"text": {"format": {"type": "json_schema", "name": "n", "description": DEEP}}}, "text.format.description"),
    ({"input": [{"role": "user", "content": [{}] * 8}] * (MAX_PARTS // 8 + 1)}, "input"),
    ({"tools": {}}, "tools"),
    ({"tools": [FUNCTION] * 129}, "tools"),
    ({"tools": [FUNCTION] * 2}, "tools"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [{}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name"),
    ({"tools": [{**FUNCTION, "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{**FUNCTION, "parameters": 5}]}, "tools[0].parameters"),
    ({"tools": [{**FUNCTION, "parameters": DEEP}]}, "tools[0]"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": 5}, "tool_choice"),
    ({"tool_choice": {}}, "tool_choice.type"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "function"}}, "tool_choice.name"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "none", "tools": []}}, "tool_choice.mode"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools"),
    (
        {
            "tools": [FUNCTION],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]},
        },
        "tool_choice.tools[0].name",
    ),
    (
        {
            "tools": [FUNCTION, {**FUNCTION, "name": "a b"}],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [FUNCTION]},
        },
        "tools[1].name",
    ),
]
UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    (content({"type": "input_image", "image_url": "x"}), "input[0].content[0].type"),
    (content({"type": "input_file", "file_id": "x"}), "input[0].content[0].type"),
    (item(type="item_reference", id="x"), "input[1].type"),
    (item(type="web_search_call"), "input[1].type"),
    (item(type="reasoning", summary=[], encrypted_content="x"), "input[1].encrypted_content"),
    ({"background": True, "stream": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"truncation": "auto"}, "truncation"),
    ({"include": ["reasoning.encrypted_content"]}, "include"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
    ({"reasoning": {"context": "all_turns"}}, "reasoning.context"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"moderation": {"model": "m"}}, "moderation"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "custom", "name": "f"}]}, "tools[0].type"),
    ({"tools": [{**FUNCTION, "defer_loading": True}]}, "tools[0].defer_loading"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"tools": [FUNCTION], "top_logprobs": 1}, "top_logprobs"),
    ({"tools": [FUNCTION], "include": ["message.output_text.logprobs"]}, "include"),
    ({"tools": [FUNCTION], "text": {"format": {"type": "json_object"}}}, "text.format"),
    ({"messages": [USER]}, "messages"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"n": 2}, "n"),
    ({"priority": 1}, "priority"),
]


@pytest.mark.parametrize(
    ("body", "param", "unsupported"),
    [(*row, False) for row in INVALID] + [(*row, True) for row in UNSUPPORTED],
    ids=lambda value: str(value)[:40],
)
def test_bad_requests(body: dict[str, Any], param: str, unsupported: bool, grammars: Grammars) -> None:
    engine = FakeEngine(say("x"))
    response = Api(given_services(engine, grammars=grammars)).post(ROUTE, {"input": "hello", **body})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert (error["code"] == "unsupported_parameter") == unsupported
    assert not {"messages", "response_format", "max_completion_tokens"} & {*error["message"].split()} - {*body}
    assert len(response.content) < 4200
    assert not engine.submitted


def test_another_model() -> None:
    response = Api(given_services(FakeEngine(say("x")))).post(ROUTE, {"input": "x", "model": "gpt"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_tools_that_the_model_does_not_know() -> None:
    client = Api(given_services(FakeEngine(say("x")), chat_template=ChatTemplate(tokenizer())))
    error = client.post(ROUTE, {"input": "x", "tools": FUNCTIONS}).json()["error"]
    assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")


def test_unknown_parameters_are_refused_where_that_is_wanted() -> None:
    client = Api(given_services(FakeEngine(say("x")), strict_params=True))
    error = client.post(ROUTE, {"input": "x", "inptu": "y"}).json()["error"]
    assert (error["param"], error["code"]) == ("inptu", "unknown_parameter")
    assert client.post(ROUTE, {"input": "x", "user": "u", "service_tier": "auto"}).status_code == 200


def test_put_together_sees_what_is_missing() -> None:
    """The checks above are only as good as this."""
    events = events_of(Api(given_services(FakeEngine(say("Good day.")))).post(ROUTE, {"input": "x", "stream": True}))
    assert len(put_together(json.loads(json.dumps(events)))) == 1
    for index in range(2, len(events) - 1):
        with pytest.raises((AssertionError, StopIteration)):
            assert (
                put_together(json.loads(json.dumps(events[:index] + events[index + 1 :])))
                == (events[-1]["response"]["output"])
            )
