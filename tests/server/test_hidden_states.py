"""return_hidden_states at the routes, against an engine that follows a script: which rows belong to which choice, whole
and streamed, and where an answer ends otherwise than the engine thinks."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import numpy as np
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from safetensors.numpy import load

from server.answer_memory import AnswerMemory
from server.errors import QueueFull
from server.request_context import RequestContext, current_request
from server.rows_out import MAX_ROW_BYTES
from tests.models import EOS_ID, HIDDEN_SIZE
from tests.server.fakes import MODEL, Api, FakeEngine, Line, api, ids_of, say, services

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = [5, 6, 7, 8]
MODES = ("last", "answer", "all")
ROW_BYTES = HIDDEN_SIZE * 4


def states(member: dict[str, Any]) -> tuple[int, list[float]]:
    """(its first position, the first value of every row); the file says what the JSON says."""
    (name, rows), *others = load(base64.b64decode(member["data"])).items()
    assert (name, others) == ("hidden_states", [])
    assert rows.dtype == np.float32
    assert rows.shape == (member["rows"], member["hidden"]) == (len(rows), HIDDEN_SIZE)
    assert member["dtype"] == "float32"
    assert (rows == rows[:, :1]).all()
    return member["start"], rows[:, 0].tolist()


def expected(mode: str, prompt: int, made: int, choice: int = 0) -> tuple[int, list[float]]:
    """As the fake engine writes them: the position, and a tenth of the choice whose computation it was."""
    end = prompt + max(made - 1, 0)
    begin = {"last": end - 1, "answer": prompt - 1, "all": 0}[mode]
    values = [position + (choice / 10 if position >= prompt - 1 else 0) for position in range(begin, end)]
    return begin, np.array(values, np.float32).tolist()


def streamed(text: str) -> list[dict[str, Any]]:
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


@pytest.mark.parametrize("tokens_per_event", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_whole_and_streamed_completions(mode: str, tokens_per_event: int) -> None:
    """Choices of different lengths, which all have the prompt's states and their own."""
    lengths = (5, 2, 9)
    body = {"prompt": PROMPT, "n": 3, "max_tokens": 20, "return_hidden_states": mode}
    script = lambda _ids, choice: Line([9] * lengths[choice] + [EOS_ID])  # noqa: E731
    with api(script, tokens_per_event=tokens_per_event) as (client, _):
        whole = client.post(COMPLETIONS, body).json()
        Completion.model_validate(whole)
        chunks = streamed(client.post(COMPLETIONS, {**body, "stream": True}).text)
    for choice in whole["choices"]:
        made = lengths[choice["index"]] + 1  # the stop token was chosen, too
        assert states(choice["hidden_states"]) == expected(mode, 4, made, choice["index"])
    ends = {each["index"]: each for chunk in chunks for each in chunk["choices"] if each["finish_reason"]}
    assert len(ends) == 3
    for choice in whole["choices"]:
        assert ends[choice["index"]]["hidden_states"] == choice["hidden_states"]
    others = [each for chunk in chunks for each in chunk["choices"] if not each["finish_reason"]]
    assert others and not any("hidden_states" in each for each in others)


@pytest.mark.parametrize("mode", MODES)
def test_chat(mode: str) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "return_hidden_states": mode, "max_tokens": 20}
    with api(say("abc")) as (client, engine):
        whole = client.post(CHAT, body).json()
        ChatCompletion.model_validate(whole)
        chunks = streamed(client.post(CHAT, {**body, "stream": True}).text)
        prompt = len(engine.submitted[0].prompt)
    member = whole["choices"][0]["hidden_states"]
    assert states(member) == expected(mode, prompt, len(ids_of("abc")) + 1)
    assert [c["hidden_states"] for chunk in chunks for c in chunk["choices"] if "hidden_states" in c] == [member]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("tokens_per_event", [1, 100])
@pytest.mark.parametrize("mode", MODES)
def test_a_stop_string_ends_them(mode: str, tokens_per_event: int) -> None:
    """Only the server knows of that end: the engine has gone on, and its later states are none of the answer's."""
    text = "The answer is in the question."
    body = {"prompt": PROMPT, "stop": " in", "max_tokens": 60, "return_hidden_states": mode}
    with api(say(text), tokens_per_event=tokens_per_event) as (client, engine):
        whole = client.post(COMPLETIONS, body).json()
    choice = whole["choices"][0]
    assert choice["stop_reason"] == " in"
    made = whole["usage"]["completion_tokens"]
    assert made < len(ids_of(text))
    assert states(choice["hidden_states"]) == expected(mode, 4, made)
    assert engine.submitted[0].sampling.return_hidden_states == ("all" if mode == "all" else "answer")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_only_the_prompts(path: str, mode: str) -> None:
    """max_tokens 0: nothing is generated."""
    prompt = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hello"}]}
    engine = _PromptOnly()
    response = Api(services(engine)).post(path, {**prompt, "max_tokens": 0, "return_hidden_states": mode})
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    length = len(engine.submitted[0].prompt)
    assert states(choice["hidden_states"]) == expected(mode, length, 0)
    assert choice["finish_reason"] == "length"
    assert response.json()["usage"]["completion_tokens"] == 0


class _PromptOnly(FakeEngine):
    """Sends a state for every row of the prompt that is asked for."""

    def __init__(self) -> None:
        super().__init__(say(""))

    async def _run(self, inbox: Any, submitted: Any) -> None:
        length = len(submitted.prompt) + submitted.sampling.latent_steps
        first = 0 if submitted.sampling.return_hidden_states == "all" else length - 1
        self._add_hidden(inbox, 0, first, length - first)
        submitted.sampling = type(submitted.sampling)(max_tokens=0)
        await super()._run(inbox, submitted)


def test_best_of_keeps_each_choices_own() -> None:
    script = lambda _ids, choice: Line([9] * (choice + 1), "length")  # noqa: E731
    body = {"prompt": PROMPT, "n": 1, "best_of": 3, "max_tokens": 3, "return_hidden_states": "answer", "logprobs": 0}
    with api(script) as (client, _):
        choice = client.post(COMPLETIONS, body).json()["choices"][0]
    start, values = states(choice["hidden_states"])
    assert len(values) == len(choice["logprobs"]["tokens"])
    assert start == 3


@pytest.mark.parametrize("value", ["first", True, 1, ["all"], ""])
def test_other_values(value: Any) -> None:
    with api(say("x")) as (client, engine):
        response = client.post(COMPLETIONS, {"prompt": PROMPT, "return_hidden_states": value})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "return_hidden_states"
        assert "'last', 'answer' or 'all'" in response.json()["error"]["message"]
        assert not engine.submitted


@pytest.mark.parametrize("value", [None, False])
def test_not_asked_for(value: Any) -> None:
    with api(say("x")) as (client, engine):
        choice = client.post(COMPLETIONS, {"prompt": PROMPT, "return_hidden_states": value}).json()["choices"][0]
        assert "hidden_states" not in choice
        assert engine.submitted[0].sampling.return_hidden_states == ""


@pytest.mark.parametrize("asked", [{"return_hidden_states": "all"}, {"latent_steps": 2}])
def test_the_responses_api_has_none(asked: dict[str, Any]) -> None:
    with api(say("x")) as (client, _):
        error = client.post("/v1/responses", {"input": "x", **asked}).json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_parameter", *asked)
        assert client.post("/v1/responses", {"input": "x", "latent_steps": 0}).status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, COMPLETIONS + "/render"])
def test_more_than_an_answer_holds(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 rows: a prompt of 4 and 16 tokens, five times."""
    monkeypatch.setattr("server.rows_out.MAX_ROW_BYTES", 100 * ROW_BYTES)
    body = {"prompt": PROMPT, "max_tokens": 16, "return_hidden_states": "all"}
    with api(say("x")) as (client, engine):
        assert client.post(path, {**body, "n": 5}).status_code == 200
        served = len(engine.submitted)
        error = client.post(path, {**body, "n": 6}).json()["error"]
        assert (error["param"], error["code"]) == ("return_hidden_states", "invalid_value")
        assert "100 rows" in error["message"] and "120" in error["message"]
        # The others are smaller, but for a stop string.
        for mode, extra, status in (("answer", {}, 200), ("last", {}, 200), ("last", {"stop": "x"}, 400)):
            tokens = 20 if mode == "answer" else 100
            asked = {**body, "n": 5, "max_tokens": tokens, "return_hidden_states": mode, **extra}
            assert client.post(path, asked).status_code == status
        assert len(engine.submitted) == served + (2 if path == COMPLETIONS else 0)
    assert MAX_ROW_BYTES == 128 << 20


def test_all_answers_together_are_bounded() -> None:
    budget = AnswerMemory(100)

    async def request(nbytes: int) -> RequestContext:
        context = RequestContext("req")
        current_request.set(context)
        budget.reserve(nbytes)
        return context

    async def scenario() -> None:
        first = await asyncio.create_task(request(200))  # alone, even more than fits
        with pytest.raises(QueueFull):
            await asyncio.create_task(request(1))
        await asyncio.create_task(request(0))
        first.end()
        assert budget.used == 0
        both = [await asyncio.create_task(request(50)) for _ in range(2)]
        with pytest.raises(QueueFull):
            await asyncio.create_task(request(1))
        for each in both:
            each.end()
        assert budget.used == 0

    asyncio.run(scenario())


def test_latent_steps_are_rows_of_the_prompt() -> None:
    """What they leave of the context, which states are whose, and what is kept of a prompt that is cut for them."""
    engine = _PromptOnly()
    client = Api(services(engine))
    body = {"prompt": PROMPT, "max_tokens": 0, "latent_steps": 3, "return_hidden_states": "all"}
    assert states(client.post(COMPLETIONS, body).json()["choices"][0]["hidden_states"]) == expected("all", 7, 0)
    with api(say("x")) as (other, scripted):
        context = MODEL.max_model_len
        chat = {"messages": [{"role": "user", "content": "hello"}], "latent_steps": 3}
        assert other.post(CHAT, chat).status_code == 200
        cut = {"prompt": [5] * context, "max_tokens": 10, "latent_steps": 3, "truncate_prompt_tokens": -1}
        assert other.post(COMPLETIONS, cut).status_code == 200
        fits = {"prompt": [5] * 10, "max_tokens": context - 13, "latent_steps": 3}
        assert other.post(COMPLETIONS, fits).status_code == 200
        error = other.post(COMPLETIONS, {**fits, "max_tokens": context - 12}).json()["error"]
    assert error["code"] == "context_length_exceeded" and "3 in latent_steps" in error["message"]
    first, second, third = scripted.submitted
    assert first.sampling.max_tokens == context - len(first.prompt) - 3
    assert [each.sampling.latent_steps for each in scripted.submitted] == [3, 3, 3]
    assert (len(second.prompt), third.sampling.max_tokens) == (context - 13, context - 13)


def test_states_that_did_not_come() -> None:
    """An engine that loses some must not be answered for."""

    class Forgetful(FakeEngine):
        @staticmethod
        def _add_hidden(inbox: Any, choice: int, start: int, count: int) -> None:
            if start != 5:
                FakeEngine._add_hidden(inbox, choice, start, count)

    client = Api(services(Forgetful(say("The answer"))))
    response = client.post(COMPLETIONS, {"prompt": PROMPT, "return_hidden_states": "answer"})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_failed")


def test_the_context_is_the_limit_still() -> None:
    body = {"prompt": [5] * MODEL.max_model_len, "return_hidden_states": "last"}
    client = Api(services(_PromptOnly()))
    assert client.post(COMPLETIONS, {**body, "max_tokens": 1}).status_code == 400
    assert client.post(COMPLETIONS, {**body, "max_tokens": 0}).status_code == 200
