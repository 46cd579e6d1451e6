"""POST /v1/chat/completions, end to end but for the engine: whole and streamed answers, checked with OpenAI's types."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from server.chat_template import ChatTemplate
from tests.models import BOS_ID, EOS_ID
from tests.server.completion_calls import events
from tests.server.fakes import MODEL, Api, FakeEngine, Line, api, byte_ids, ids_of, say, services, tokenizer

ROUTE = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
ANSWER = "The answer is Paris."
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}


def chat(client: Api, **body: Any) -> dict[str, Any]:
    """A whole answer, after it has been compared with the streamed one."""
    body = {"messages": HELLO, **body}
    response = client.post(ROUTE, body)
    assert response.status_code == 200, response.text
    whole: dict[str, Any] = response.json()
    ChatCompletion.model_validate(whole, strict=True)
    chunks = events(client.post(ROUTE, {**body, "stream": True, "stream_options": {"include_usage": True}}))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    for choice in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        check_order(parts)
        assert "".join(part["delta"].get("content", "") for part in parts) == choice["message"]["content"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert parts[-1]["stop_reason"] == choice["stop_reason"]
        entries = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
        assert entries == (choice["logprobs"] or {"content": []})["content"]
        assert [token for part in parts for token in part.get("token_ids", [])] == choice.get("token_ids", [])
    return whole


def check_order(parts: list[dict[str, Any]]) -> None:
    """The role first and never again, then content, then an empty delta with the reason for the end."""
    assert parts[0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(part["delta"]) == {"content"} for part in parts[1:-1])
    assert parts[-1]["delta"] == {}
    assert [part["finish_reason"] is None for part in parts] == [*[True] * (len(parts) - 1), False]


def prompt_of(engine: FakeEngine) -> str:
    ids = [int(token_id) for token_id in engine.submitted[0].prompt.token_ids]
    return tokenizer().decode(ids, skip_special_tokens=False)


def test_an_answer() -> None:
    with api(say(ANSWER)) as (client, engine):
        answer = chat(client, model="tiny")
    (choice,) = answer["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": ANSWER, "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert (answer["object"], answer["id"].startswith("chatcmpl-")) == ("chat.completion", True)
    assert prompt_of(engine) == "<bos><turn>user\nhello<eos>\n<turn>assistant\n"
    assert list(engine.submitted[0].prompt.token_ids).count(BOS_ID) == 1
    # Neither limit given: the rest of the context.
    assert engine.submitted[0].sampling.max_tokens == MODEL.max_model_len - len(engine.submitted[0].prompt)


@pytest.mark.parametrize("stop", ["answer", ["answer is", "zzz"]])
def test_stop_strings_and_choices(stop: Any) -> None:
    with api(say(ANSWER)) as (client, _):
        answer = chat(client, n=3, stop=stop)
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["The "] * 3
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]


def test_characters_split_over_tokens() -> None:
    with api(lambda _ids, _choice: Line(byte_ids("🫠!".encode()), "length")) as (client, _):
        (choice,) = chat(client, max_tokens=5, logprobs=True)["choices"]
    assert choice["message"]["content"] == "🫠!"
    entries = choice["logprobs"]["content"]
    assert bytes(value for entry in entries for value in entry["bytes"]).decode() == "🫠!"
    assert not any("\ufffd" in entry["token"] for entry in entries)


def test_logprobs_alone() -> None:
    with api(say(ANSWER)) as (client, engine):
        (choice,) = chat(client, logprobs=True)["choices"]
    entries = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == ANSWER + "<eos>"
    assert all(entry["top_logprobs"] == [] for entry in entries)
    assert engine.submitted[0].sampling.logprobs == 0


def test_top_logprobs() -> None:
    with api(say(ANSWER)) as (client, _):
        (choice,) = chat(client, logprobs=True, top_logprobs=3)["choices"]
    assert all(len(entry["top_logprobs"]) == 3 for entry in choice["logprobs"]["content"])


def test_an_empty_answer() -> None:
    with api(say("")) as (client, _):
        answer = chat(client)
        with_logprobs = chat(client, logprobs=True, stop_token_ids=[5])
    assert answer["choices"][0]["message"]["content"] == ""
    assert [entry["token"] for entry in with_logprobs["choices"][0]["logprobs"]["content"]] == ["<eos>"]


def test_token_ids_are_returned() -> None:
    with api(say(ANSWER)) as (client, engine):
        answer = chat(client, return_token_ids=True)
        stream = {"messages": HELLO, "return_token_ids": True, "stream": True}
        first, *others = events(client.post(ROUTE, stream))
    assert answer["choices"][0]["token_ids"] == [*ids_of(ANSWER), EOS_ID]
    assert answer["prompt_token_ids"] == first["prompt_token_ids"] == list(engine.submitted[0].prompt.token_ids)
    assert not any("prompt_token_ids" in chunk for chunk in others)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"add_generation_prompt": False}, "<bos><turn>user\nhello<eos>\n"),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": "Well"}], "continue_final_message": True},
            "<bos><turn>user\nhello<eos>\n<turn>assistant\nWell",
        ),
        ({"messages": [{"role": "developer", "content": "x"}]}, "<bos><turn>system\nx<eos>\n<turn>assistant\n"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
            "<bos><turn>user\na\nb<eos>\n<turn>assistant\n",
        ),
    ],
)
def test_prompts(body: dict[str, Any], expected: str) -> None:
    with api(say(ANSWER)) as (client, engine):
        chat(client, **body)
    assert prompt_of(engine) == expected


def test_template_variables() -> None:
    engine = FakeEngine(say(ANSWER))
    client = Api(services(engine, chat_template=ChatTemplate(tokenizer(), "{{ mood }}")))
    chat(client, chat_template_kwargs={"mood": "calm"})
    assert prompt_of(engine) == "calm"


def test_a_template_that_knows_developers_and_documents() -> None:
    engine = FakeEngine(say(ANSWER))
    text = "{% if messages[0].role == 'developer' %}{{ documents[0].text }}{% endif %}"
    client = Api(services(engine, chat_template=ChatTemplate(tokenizer(), text)))
    chat(client, messages=[{"role": "developer", "content": "x"}], documents=[{"text": "paper"}])
    assert prompt_of(engine) == "paper"


def test_a_template_of_the_requests_own() -> None:
    """Only where the operator has said so."""
    engine = FakeEngine(say(ANSWER))
    chat(Api(services(engine, trust_request_template=True)), chat_template="{{ messages[0].content }}!")
    assert prompt_of(engine) == "hello!"


def test_a_conversation_that_is_cut() -> None:
    with api(say(ANSWER)) as (client, engine):
        full = client.post("/tokenize", {"messages": HELLO}).json()["tokens"]
        chat(client, truncate_prompt_tokens=4)
        long = [{"role": "user", "content": "9" * 500}]
        chat(client, messages=long, truncate_prompt_tokens=-1)
        chat(client, messages=long, truncate_prompt_tokens=-1, max_completion_tokens=20, max_tokens=5)
    submitted = [each.prompt.token_ids.tolist() for each in engine.submitted[::2]]
    assert submitted[0] == full[-4:]
    assert [len(each) for each in submitted[1:]] == [MODEL.max_model_len - 1, MODEL.max_model_len - 20]


def test_prompt_logprobs() -> None:
    with api(say(ANSWER)) as (client, engine):
        response = client.post(ROUTE, {"messages": HELLO, "n": 2, "prompt_logprobs": 2})
    answer = response.json()
    ChatCompletion.model_validate(answer, strict=True)
    ids = engine.submitted[0].prompt.token_ids.tolist()
    first, *entries = answer["prompt_logprobs"]
    assert first is None and len(entries) == len(ids) - 1
    for token, entry in zip(ids[1:], entries, strict=True):
        assert (entry[str(token)]["logprob"], entry[str(token)]["rank"], len(entry)) == (-1.0, 2, 2)


def test_the_service_tier_is_told_to_those_who_name_one() -> None:
    with api(say(ANSWER)) as (client, _):
        assert chat(client, service_tier="flex")["service_tier"] == "default"
        assert "service_tier" not in chat(client)


def test_max_completion_tokens_wins() -> None:
    with api(say(ANSWER)) as (client, engine):
        chat(client, max_completion_tokens=3, max_tokens=5)
        chat(client, max_tokens=5)
    assert [each.sampling.max_tokens for each in engine.submitted[::2]] == [3, 5]


def test_strict_servers() -> None:
    client = Api(services(FakeEngine(say(ANSWER)), strict_params=True))
    chat(client, metadata={"a": "b"}, store=False)
    error = client.post(ROUTE, {"messages": HELLO, "max_token": 5}).json()["error"]
    assert (error["code"], error["param"]) == ("unknown_parameter", "max_token")


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "messages", "tools", "conversation", "self", "padding"])
def test_variables_that_are_ours(name: str) -> None:
    with api(say(ANSWER)) as (client, _):
        response = client.post(ROUTE, {"messages": HELLO, "chat_template_kwargs": {name: "x"}})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template_kwargs")


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "messages", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "invalid_value"),
        ({"messages": [{"role": "user", "content": "9" * 200}]}, "messages", "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "9" * 3_000_000}]}, "messages", "context_length_exceeded"),
        ({"messages": HELLO, "max_tokens": 1000}, "messages", "context_length_exceeded"),
        ({"messages": HELLO, "max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"messages": HELLO, "tools": [TOOL]}, "tools", "unsupported_parameter"),
        ({"messages": HELLO, "functions": [TOOL["function"]]}, "functions", "unsupported_parameter"),
        ({"messages": HELLO, "function_call": {"name": "f"}}, "function_call", "unsupported_parameter"),
        ({"messages": HELLO, "echo": True}, "echo", "unsupported_parameter"),
        ({"messages": HELLO, "chat_template": "{{ x }}"}, "chat_template", "unsupported_parameter"),
        ({"messages": HELLO, "documents": [{"text": "x"}]}, "documents", "unsupported_parameter"),
        ({"messages": HELLO, "documents": "x"}, "documents", "invalid_value"),
        ({"messages": HELLO, "priority": -1}, "priority", "unsupported_parameter"),
        (
            {"messages": HELLO, "chat_template_kwargs": {"x": 1}, "add_generation_prompt": 1},
            "add_generation_prompt",
            "invalid_value",
        ),
        ({"messages": HELLO, "response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
        ({"messages": HELLO, "model": "other"}, "model", "model_not_found"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_bad_requests(body: dict[str, Any], param: str, code: str) -> None:
    with api(say(ANSWER)) as (client, engine):
        for stream in (False, True):
            response = client.post(ROUTE, {**body, "stream": stream})
            assert response.status_code == (404 if code == "model_not_found" else 400)
            error = response.json()["error"]
            assert (error["param"], error["code"]) == (param, code)
            assert len(response.content) < 4200
        chat(client)
    assert len(engine.submitted) == 2


def test_a_template_that_makes_nothing() -> None:
    client = Api(services(FakeEngine(say(ANSWER)), chat_template=ChatTemplate(tokenizer(), "{{ '' }}")))
    assert client.post(ROUTE, {"messages": HELLO}).json()["error"]["param"] == "messages"


def test_an_engine_that_dies() -> None:
    with api(say(ANSWER), fail_after=3) as (client, _):
        assert client.post(ROUTE, {"messages": HELLO}).status_code == 503
        *_, error = events(client.post(ROUTE, {"messages": HELLO, "stream": True}))
    assert error["error"]["code"] == "engine_failed"
