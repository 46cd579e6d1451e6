"""POST /v1/completions, end to end but for the engine: whole and streamed answers, checked with OpenAI's own types."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from runner.messages import EMBEDDING_ID, Span
from server.errors import EngineFailed, QueueFull
from server.inputs import MAX_CHOICES, MAX_PROMPTS, completion_prompts
from server.schemas import CompletionRequest, parse
from tests.models import EOS_ID, VOCAB_SIZE
from tests.server.completion_calls import ANSWER, PROMPT, ROUTE, complete, embedding, events, refused, tokenizer_text
from tests.server.fakes import MODEL, Api, FakeEngine, Line, api, byte_ids, ids_of, say, services

# --- prompts ----------------------------------------------------------------------------------------------------------


def test_text() -> None:
    with api(say(ANSWER)) as (client, engine):
        answer = complete(client, model="tiny", prompt=PROMPT, max_tokens=64)
    (choice,) = answer["choices"]
    assert choice == {"index": 0, "text": ANSWER, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    assert list(engine.submitted[0].prompt.token_ids) == ids_of(PROMPT)
    assert engine.submitted[0].prompt.token_ids.dtype == np.int32
    assert answer["model"] == "tiny"
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["usage"] == {
        "prompt_tokens": len(ids_of(PROMPT)),
        "completion_tokens": len(ids_of(ANSWER)) + 1,
        "total_tokens": len(ids_of(PROMPT)) + len(ids_of(ANSWER)) + 1,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_token_ids_are_the_same_prompt() -> None:
    with api(say(ANSWER)) as (client, engine):
        complete(client, prompt=ids_of(PROMPT))
        complete(client, prompt=[ids_of(PROMPT)])
        complete(client, prompt=[PROMPT])
    assert {tuple(each.prompt.token_ids) for each in engine.submitted} == {tuple(ids_of(PROMPT))}


def test_several_prompts_and_choices() -> None:
    def script(ids: Sequence[int], choice: int) -> Line:
        return Line([*ids, *ids_of(str(choice))], "length")

    prompts = ["one", "two", "three"]
    with api(script) as (client, engine):
        answer = complete(client, prompt=prompts, n=2, max_tokens=50)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [choice["text"] for choice in answer["choices"]] == ["one0", "one1", "two0", "two1", "three0", "three1"]
    prompt_tokens = sum(len(ids_of(prompt)) for prompt in prompts)
    assert answer["usage"]["prompt_tokens"] == prompt_tokens  # once, whatever n is
    assert answer["usage"]["completion_tokens"] == 2 * prompt_tokens + 6
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}  # of the first choices
    assert [each.n for each in engine.submitted] == [2] * 6
    assert len({each.sampling.seed for each in engine.submitted}) == 6


def test_embeddings_come_first() -> None:
    (one, array), (two, _) = embedding(3), embedding(2, 0.25)
    with api(say(ANSWER)) as (client, engine):
        answer = client.post(ROUTE, {"prompt": PROMPT, "prompt_embeds": [one, two], "max_tokens": 1}).json()
        complete(client, prompt_embeds=one)
    assert [len(each.prompt) for each in engine.submitted] == [3, 2, len(ids_of(PROMPT)), 3, 3]
    assert answer["usage"]["prompt_tokens"] == 5 + len(ids_of(PROMPT))
    rows = engine.submitted[0].prompt
    assert list(rows.token_ids) == [EMBEDDING_ID] * 3
    assert rows.spans == (Span(0, 3),)
    assert bytes(rows.rows[0]) == array.tobytes()
    assert len(rows.row_digests) == 3 * 16
    assert engine.submitted[2].prompt.spans == ()


@pytest.mark.parametrize("prompt", ["", [], None])
def test_embeddings_beside_an_empty_prompt(prompt: Any) -> None:
    """OpenAI's client insists on a prompt; those who only have embeddings send an empty one."""
    with api(say(ANSWER)) as (client, _):
        assert len(complete(client, prompt=prompt, prompt_embeds=embedding(2)[0])["choices"]) == 1


def test_embeddings_switched_off() -> None:
    client = Api(services(FakeEngine(say(ANSWER)), enable_prompt_embeds=False))
    assert refused(client, prompt_embeds=embedding(2)[0])["param"] == "prompt_embeds"
    complete(client, prompt=PROMPT)


@pytest.mark.parametrize(
    "embeds",
    ["", "!!!", "AAAA", 5, [5], {"a": 1}, [embedding(1)[0], "AAAA"], embedding(MODEL.max_model_len + 1)[0]],
    ids=["empty", "no base64", "no format", "number", "numbers", "object", "second", "too long"],
)
def test_bad_embeddings(embeds: Any) -> None:
    with api(say(ANSWER)) as (client, engine):
        assert refused(client, prompt_embeds=embeds)["param"] == "prompt_embeds"
        complete(client, prompt=PROMPT)
    assert len(engine.submitted) == 2


def test_embeddings_that_leave_no_room() -> None:
    with api(say(ANSWER)) as (client, _):
        error = refused(client, prompt_embeds=embedding(MODEL.max_model_len)[0])
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt_embeds")


@pytest.mark.parametrize(
    "prompt",
    [
        *("", [""], [], [[]], [[5], []], ["x", ""]),
        *([-1], [[-1]], [VOCAB_SIZE], [2**31], [2**70], [True], [1.0], [[True]], [["x"]], [None]),
        *(["x", 1], [1, "x"], [[1], 2], 5, 1.5, True, {"a": 1}),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_bad_prompts(prompt: Any) -> None:
    with api(say(ANSWER)) as (client, engine):
        assert refused(client, prompt=prompt)["param"] == "prompt"
    assert engine.submitted == []


def test_no_prompt() -> None:
    with api(say(ANSWER)) as (client, _):
        bodies: list[dict[str, Any]] = [
            {},
            {"prompt": None},
            {"prompt_embeds": []},
            {"prompt": None, "prompt_embeds": None},
        ]
        for body in bodies:
            assert refused(client, **body)["param"] == "prompt"


def test_too_many_prompts_and_choices() -> None:
    with api(say(ANSWER)) as (client, engine):
        assert str(MAX_PROMPTS) in refused(client, prompt=["x"] * (MAX_PROMPTS + 1))["message"]
        error = refused(client, prompt=["x"] * (MAX_CHOICES // 128 + 1), n=128)
        assert (error["param"], str(MAX_CHOICES) in error["message"]) == ("n", True)
    assert engine.submitted == []


UNSEEN: list[Any] = [*[5] * MAX_PROMPTS, "x"]
"""Of so many ids none is looked at."""


@pytest.mark.parametrize(
    "prompt", ["9" * 200, [5] * 128, "9" * 2_000_000, UNSEEN], ids=["text", "ids", "huge", "unseen"]
)
def test_a_prompt_beyond_the_context(prompt: Any) -> None:
    with api(say(ANSWER)) as (client, _):
        error = refused(client, prompt=prompt)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


# --- texts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("tokens_per_event", [1, 3, 100])
def test_stop_strings(include: bool, tokens_per_event: int) -> None:
    with api(say(ANSWER), tokens_per_event=tokens_per_event) as (client, engine):
        answer = complete(
            client, prompt=PROMPT, max_tokens=64, stop=["the ans", "zzz"], include_stop_str_in_output=include
        )
    (choice,) = answer["choices"]
    assert choice["text"] == ("Paris is the ans" if include else "Paris is ")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "the ans")
    expected = next(count for count in range(99) if "the ans" in "".join(tokenizer_text(ids_of(ANSWER)[:count])))
    assert answer["usage"]["completion_tokens"] == expected
    if tokens_per_event == 1:  # else the end may have come with it
        assert [each.aborted for each in engine.submitted] == [[-1], [-1]]


def test_a_stop_string_ends_only_its_own_choice() -> None:
    def script(_ids: Sequence[int], choice: int) -> Line:
        return Line(byte_ids(b"ab" * 10 if choice == 1 else b"xy" * 10), "length")

    with api(script) as (client, engine):
        answer = complete(client, prompt=PROMPT, n=3, max_tokens=64, stop="b")
    assert [choice["text"] for choice in answer["choices"]] == ["xy" * 10, "a", "xy" * 10]
    assert answer["usage"]["completion_tokens"] == 20 + 2 + 20
    assert [each.aborted for each in engine.submitted] == [[1], [1]]


def test_characters_split_over_tokens() -> None:
    with api(lambda _ids, _choice: Line(byte_ids("🫠龜".encode()), "length")) as (client, _):
        assert complete(client, prompt=PROMPT, max_tokens=64)["choices"][0]["text"] == "🫠龜"
        assert complete(client, prompt=PROMPT, max_tokens=5)["choices"][0]["text"] == "🫠\ufffd"
        chunks = events(client.post(ROUTE, {"prompt": PROMPT, "max_tokens": 64, "stream": True}))
    assert [choice["text"] for chunk in chunks for choice in chunk["choices"]] == ["🫠", "龜"]


def test_stop_token_ids() -> None:
    stop = ids_of(ANSWER)[4]
    with api(say(ANSWER)) as (client, engine):
        (choice,) = complete(client, prompt=PROMPT, max_tokens=64, stop_token_ids=[stop])["choices"]
        (eos,) = complete(client, prompt=PROMPT, max_tokens=64)["choices"]
    assert (choice["text"], choice["stop_reason"]) == (tokenizer_text(ids_of(ANSWER)[:4]), stop)
    assert (eos["finish_reason"], eos["stop_reason"]) == ("stop", None)
    assert engine.submitted[0].sampling.stop_token_ids == (EOS_ID, stop)


def test_length() -> None:
    with api(say(ANSWER)) as (client, _):
        answer = complete(client, prompt=PROMPT, max_tokens=3)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3


def test_special_tokens_are_shown_on_request() -> None:
    with api(lambda _ids, _choice: Line([EOS_ID, *ids_of("x")], "length")) as (client, _):
        body = {"prompt": PROMPT, "ignore_eos": True, "max_tokens": 2}
        assert complete(client, **body)["choices"][0]["text"] == "x"
        assert complete(client, **body, skip_special_tokens=False)["choices"][0]["text"] == "<eos>x"


# --- streams ----------------------------------------------------------------------------------------------------------


def test_headers() -> None:
    with api(say(ANSWER)) as (client, _):
        headers = client.post(ROUTE, {"prompt": PROMPT, "stream": True}).headers
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert "content-length" not in headers


def test_usage_only_on_request() -> None:
    with api(say(ANSWER)) as (client, _):
        for options in (None, {}, {"include_usage": False}, {"continuous_usage_stats": True}):
            chunks = events(client.post(ROUTE, {"prompt": PROMPT, "stream": True, "stream_options": options}))
            assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


def test_running_usage() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    with api(say(ANSWER)) as (client, _):
        chunks = events(
            client.post(ROUTE, {"prompt": PROMPT, "stream": True, "stream_options": options, "n": 2, "max_tokens": 64})
        )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] > 0
    assert counts[-2] == counts[-1] == 2 * (len(ids_of(ANSWER)) + 1)


def test_an_engine_that_dies() -> None:
    with api(say(ANSWER), fail_after=5) as (client, _):
        response = client.post(ROUTE, {"prompt": PROMPT, "max_tokens": 64})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_failed")
        *chunks, error = events(client.post(ROUTE, {"prompt": PROMPT, "max_tokens": 64, "stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == tokenizer_text(ids_of(ANSWER)[:5])
    assert set(error) == {"error"}
    assert error["error"]["code"] == "engine_failed"


def test_a_fault_of_ours_in_a_stream(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("a sec" + "ret")  # the log may quote this line, but not its value

    with api(say(ANSWER)) as (client, engine):
        monkeypatch.setattr("server.choices.Choice.feed", broken)
        (error,) = events(client.post(ROUTE, {"prompt": PROMPT, "stream": True}))
        with pytest.raises(RuntimeError):  # in a server, a 500
            client.post(ROUTE, {"prompt": PROMPT})
    assert error["error"]["type"] == "server_error"
    assert "secret" not in error["error"]["message"] + caplog.text
    assert [each.aborted for each in engine.submitted] == [[-1], [-1]]


@pytest.mark.parametrize("count", [1, 3])
def test_a_full_queue(count: int) -> None:
    for stream in (False, True):
        with api(say(ANSWER), refuse=[None] * (count - 1) + [QueueFull("full")], hang=True) as (client, engine):
            response = client.post(ROUTE, {"prompt": ["x"] * count, "stream": stream})
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        assert all(each.aborted == [-1] for each in engine.submitted)


def test_an_engine_that_forgets_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stream ends; ours must not look like a success."""

    with api(say(ANSWER), hang=True) as (client, _):
        monkeypatch.setattr("server.generation.GenerationStream.take", lambda *_: None)
        monkeypatch.setattr("server.generation.GenerationStream.has_ended", True)
        assert client.post(ROUTE, {"prompt": PROMPT}).status_code == EngineFailed().status


def test_the_event_loop_has_its_turn_between_the_texts_of_a_batch() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def main() -> None:
        counting = asyncio.create_task(count())
        request = parse(CompletionRequest, {"prompt": ["hello"] * 100})
        assert len(await completion_prompts(request, services(FakeEngine(say(ANSWER))))) == 100
        counting.cancel()

    asyncio.run(main())
    assert turns >= 99


# --- parameters -------------------------------------------------------------------------------------------------------


def test_what_the_engine_is_told() -> None:
    with api(say(ANSWER)) as (client, engine):
        complete(client, prompt=PROMPT, n=2, cache_salt="mine", temperature=0, seed=5, logit_bias={"7": 1})
    request = engine.submitted[0]
    assert (request.n, request.cache_salt) == (2, "mine")
    assert (request.sampling.temperature, request.sampling.seed) == (0, 5)
    assert request.sampling.logit_bias == ((7, 1.0),)


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"max_tokens": 1000}, "prompt", "context_length_exceeded"),
        ({"n": "2"}, "n", "invalid_value"),
        ({"best_of": 1, "n": 2}, "best_of", "invalid_value"),
        ({"best_of": 100, "prompt": ["x"] * 41}, "best_of", "invalid_value"),
        ({"priority": 1}, "priority", "unsupported_parameter"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "invalid_value"),
        ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids", "invalid_value"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids", "invalid_value"),
        ({"allowed_token_ids": [True]}, "allowed_token_ids", "invalid_value"),
        ({"allowed_token_ids": "5"}, "allowed_token_ids", "invalid_value"),
        ({"allowed_token_ids": [EOS_ID], "min_tokens": 1}, "allowed_token_ids", "invalid_value"),
        ({"bad_words": [f"{each}" + "pqrstuvw" * 15 for each in range(9)]}, "bad_words", "invalid_value"),
        ({"suffix": "x"}, "suffix", "unsupported_parameter"),
        ({"guided_json": 5}, "guided_json", "invalid_value"),
        ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias", "invalid_value"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids", "invalid_value"),
    ],
)
def test_bad_parameters(body: dict[str, Any], param: str, code: str) -> None:
    with api(say(ANSWER)) as (client, engine):
        error = refused(client, **{"prompt": PROMPT, **body})
        complete(client, prompt=PROMPT)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert len(engine.submitted) == 2


def test_models() -> None:
    with api(say(ANSWER)) as (client, _):
        assert complete(client, prompt=PROMPT, model="org/tiny")["model"] == "org/tiny"
        assert complete(client, prompt=PROMPT)["model"] == "tiny"
        error = refused(client, 404, prompt=PROMPT, model="x" * 100_000)
    assert error["code"] == "model_not_found"
    assert len(error["message"]) < 200


@pytest.mark.parametrize("content", [b'{"n": NaN}', b'{"prompt": 1e999}', b'{"prompt": "\\ud800 a"}', b"[]", b""])
def test_bad_json(content: bytes) -> None:
    with api(say(ANSWER)) as (client, _):
        response = client.post(ROUTE, content=content, headers={"content-type": "application/json"})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")
        assert client.post(ROUTE, content=content).status_code == 415


def test_while_the_model_is_loading() -> None:
    client = Api(services(FakeEngine(say(ANSWER))))
    client._app.state.services = None
    response = client.post(ROUTE, {"prompt": PROMPT})
    assert response.status_code == 503
    assert "retry-after" in response.headers
