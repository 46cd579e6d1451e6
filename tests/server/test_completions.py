"""POST /v1/completions, end to end but for the engine: whole and streamed answers, checked with OpenAI's own types."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
import pytest
from openai.types import Completion
from safetensors.numpy import save
from tokenizers.normalizers import Replace
from tokenizers.processors import TemplateProcessing

from runner.messages import EMBEDDING_ID, Span, TokenLogprobs
from server.errors import EngineFailed, QueueFull
from server.inputs import MAX_CHOICES, MAX_PROMPTS, completion_prompts
from server.logprobs import LogprobFormat
from server.schemas import CompletionRequest, parse
from server.tokenizer import Tokenizer
from tests.models import EOS_ID, HIDDEN_SIZE, VOCAB_SIZE, build_tokenizer
from tests.server.fakes import MODEL, Api, FakeEngine, Line, api, byte_ids, ids_of, say, services

ROUTE = "/v1/completions"
PROMPT = "What is the capital"
ANSWER = "Paris is the answer."


def events(response: httpx.Response) -> list[Any]:
    """The stream's events, the final [DONE] checked and left out."""
    assert response.status_code == 200, response.text
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def complete(client: Api, **body: Any) -> dict[str, Any]:
    """A whole answer, after it has been compared with the streamed one."""
    response = client.post(ROUTE, body)
    assert response.status_code == 200, response.text
    whole: dict[str, Any] = response.json()
    # Strict, except that the first echoed token's log-probability is null, in OpenAI's answers as well.
    if not body.get("echo"):
        Completion.model_validate(whole, strict=True)
    chunks = events(client.post(ROUTE, {**body, "stream": True, "stream_options": {"include_usage": True}}))
    if not body.get("echo"):
        for chunk in chunks:
            # The SDK's own type for chunks has no null in it where the API does.
            ended = [{**choice, "finish_reason": choice["finish_reason"] or "stop"} for choice in chunk["choices"]]
            Completion.model_validate({**chunk, "choices": ended}, strict=True)
    assert joined(chunks) == [
        {name: value for name, value in choice.items() if name != "prompt_token_ids"} for choice in whole["choices"]
    ]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    return whole


def joined(chunks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices that a stream adds up to."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            part.pop("prompt_token_ids", None)
            whole = choices.setdefault(part["index"], part)
            if whole is part:
                continue
            assert whole["finish_reason"] is None, "nothing may follow the finish_reason"
            whole["text"] += part["text"]
            whole["finish_reason"], whole["stop_reason"] = part["finish_reason"], part["stop_reason"]
            for name, values in (part["logprobs"] or {}).items():
                whole["logprobs"][name] += values
            if "token_ids" in part:
                whole["token_ids"] += part["token_ids"]
    return [choices[index] for index in sorted(choices)]


def refused(client: Api, status: int = 400, **body: Any) -> dict[str, Any]:
    """The error, which must be the same for a streamed request: before the first event, with a status."""
    response = client.post(ROUTE, body)
    assert response.status_code == status, response.text
    assert client.post(ROUTE, {**body, "stream": True}).status_code == status
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(response.content) < 4200
    return error


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


def embedding(rows: int, value: float = 0.5) -> tuple[str, np.ndarray[Any, Any]]:
    array = np.full((rows, HIDDEN_SIZE), value, dtype=np.float32)
    return base64.b64encode(save({"x": array})).decode(), array


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


@pytest.mark.parametrize("prompt", ["9" * 200, [5] * 128, "9" * 2_000_000], ids=["text", "ids", "huge"])
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


def tokenizer_text(ids: list[int]) -> str:
    from tests.server.fakes import tokenizer

    return tokenizer().decode(ids, skip_special_tokens=True)


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


# --- log-probabilities, echo, ids -------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1, 5])
def test_logprobs(k: int) -> None:
    with api(say(ANSWER), tokens_per_event=2) as (client, engine):
        (choice,) = complete(client, prompt=PROMPT, max_tokens=64, logprobs=k)["choices"]
    found = choice["logprobs"]
    ids = [*ids_of(ANSWER), EOS_ID]
    assert "".join(found["tokens"]) == ANSWER + "<eos>"
    assert found["token_logprobs"] == [-1.0] * len(ids)
    assert all(max(k, 1) <= len(top) <= k + 1 for top in found["top_logprobs"])
    assert all(top[token] == -1.0 for token, top in zip(found["tokens"], found["top_logprobs"], strict=True))
    assert [ANSWER[offset:][: len(token)] for token, offset in zip(found["tokens"], found["text_offset"], strict=True)][
        :-1
    ] == found["tokens"][:-1]
    assert engine.submitted[0].sampling.logprobs == k


def test_logprobs_of_a_cut_text_stay_inside_of_it() -> None:
    with api(say(ANSWER)) as (client, _):
        answer = complete(client, prompt=PROMPT, max_tokens=64, logprobs=1, stop="is the")
    (choice,) = answer["choices"]
    found = choice["logprobs"]
    assert len(found["tokens"]) == answer["usage"]["completion_tokens"]
    assert max(found["text_offset"]) == len(choice["text"])


@pytest.mark.parametrize("prompt", [PROMPT, ids_of(PROMPT)], ids=["text", "ids"])
@pytest.mark.parametrize("n", [1, 3])
def test_echo(prompt: Any, n: int) -> None:
    with api(say(ANSWER)) as (client, _):
        choices = complete(client, prompt=prompt, max_tokens=64, echo=True, n=n)["choices"]
    assert [choice["text"] for choice in choices] == [PROMPT + ANSWER] * n


@pytest.mark.parametrize("max_tokens", [0, 1, 64])
@pytest.mark.parametrize("n", [1, 2])
def test_echo_with_logprobs(max_tokens: int, n: int) -> None:
    with api(say(ANSWER)) as (client, engine):
        answer = complete(client, prompt=ids_of(PROMPT), max_tokens=max_tokens, echo=True, logprobs=1, n=n)
    expected = [*ids_of(PROMPT), *[*ids_of(ANSWER), EOS_ID][:max_tokens]]
    for choice in answer["choices"]:
        found = choice["logprobs"]
        assert [len(found[name]) for name in found] == [len(expected)] * 4
        assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
        assert found["token_logprobs"][1:] == [-1.0] * (len(expected) - 1)
        for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
            assert token == "<eos>" or choice["text"][offset:].startswith(token)
    assert answer["usage"]["completion_tokens"] == n * (len(expected) - len(ids_of(PROMPT)))
    assert engine.submitted[0].sampling.prompt_logprobs == 1
    assert answer["choices"][0]["finish_reason"] == ("stop" if max_tokens == 64 else "length")


def test_echo_of_a_text_that_the_tokenizer_changes() -> None:
    own = build_tokenizer()
    own.backend_tokenizer.normalizer = Replace("x", "yyy")
    client = Api(services(FakeEngine(say("a")), tokenizer=Tokenizer(own)))
    (choice,) = complete(client, prompt="xx", echo=True, logprobs=0)["choices"]
    assert choice["text"] == "xxa"  # as it was sent
    assert max(choice["logprobs"]["text_offset"][:-2]) == 2


def test_echo_without_anything_else() -> None:
    with api(say(ANSWER)) as (client, engine):
        answer = complete(client, prompt=PROMPT, max_tokens=0, echo=True)
        assert (answer["choices"][0]["text"], answer["choices"][0]["logprobs"]) == (PROMPT, None)
        assert complete(client, prompt=[5], max_tokens=0, echo=True, logprobs=0)["choices"][0]["logprobs"] is not None
        assert refused(client, prompt=PROMPT, max_tokens=0)["param"] == "max_tokens"
    assert engine.submitted[0].sampling.prompt_logprobs == 0


def test_echo_of_half_a_character_is_completed_by_the_answer() -> None:
    first, *rest = byte_ids("🫠".encode())
    with api(lambda _ids, _choice: Line(rest, "length")) as (client, _):
        assert complete(client, prompt=[first], max_tokens=3, echo=True)["choices"][0]["text"] == "🫠"
        assert complete(client, prompt=[first], max_tokens=0, echo=True)["choices"][0]["text"] == "\ufffd"


def test_without_echo_the_text_is_that_of_the_completion_s_own_tokens() -> None:
    """As transformers decodes them, and the same whether the prompt was ids or embeddings."""
    first, *rest = byte_ids("🫠".encode())
    rest += ids_of(" ok")
    with api(lambda _ids, _choice: Line(rest, "length")) as (client, _):
        texts = [
            complete(client, max_tokens=len(rest), **prompt)["choices"][0]["text"]
            for prompt in ({"prompt": [first]}, {"prompt_embeds": embedding(1)[0]})
        ]
    assert texts == [build_tokenizer().decode(rest)] * 2


def test_echo_of_embeddings_is_refused() -> None:
    with api(say(ANSWER)) as (client, _):
        assert refused(client, prompt_embeds=embedding(2)[0], echo=True)["param"] == "echo"


def test_token_ids_are_returned() -> None:
    with api(say(ANSWER)) as (client, _):
        body = {"prompt": PROMPT, "max_tokens": 64, "return_token_ids": True, "echo": True, "logprobs": 1}
        (choice,) = complete(client, **body)["choices"]
        chunks = events(client.post(ROUTE, {**body, "stream": True}))
    assert choice["token_ids"] == [*ids_of(ANSWER), EOS_ID]
    assert choice["prompt_token_ids"] == ids_of(PROMPT)
    assert [chunk["choices"][0].get("prompt_token_ids") for chunk in chunks[:2]] == [ids_of(PROMPT), None]


def test_tokens_as_ids() -> None:
    with api(say("a")) as (client, _):
        (choice,) = complete(client, prompt=PROMPT, logprobs=0, return_tokens_as_token_ids=True)["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in (*ids_of("a"), EOS_ID)]


# --- more than OpenAI has ---------------------------------------------------------------------------------------------


def whole(client: Api, **body: Any) -> dict[str, Any]:
    """An answer to what cannot be streamed."""
    response = client.post(ROUTE, body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    Completion.model_validate(answer, strict=True)
    return answer


def test_the_best_of_several_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """By log-probability per token: choice 2's one token has the most, then choice 0 (-3 / 2), then 1 (-2)."""
    values = {ids_of("a")[0]: -2.0, ids_of("b")[0]: -1.0, ids_of("c")[0]: -0.5}

    def logprobs(token: int, _k: int) -> TokenLogprobs:
        return TokenLogprobs(token, values[token], 1, (), ())

    monkeypatch.setattr(FakeEngine, "_logprobs", staticmethod(logprobs))
    texts = ["ab", "a", "c"]
    with api(lambda _ids, choice: Line(ids_of(texts[choice]), "length")) as (client, engine):
        body = {"prompt": ["x", "y"], "best_of": 3, "max_tokens": 8}
        one, two = whole(client, **body), whole(client, **body, n=2)
    assert [(choice["index"], choice["text"]) for choice in one["choices"]] == [(0, "c"), (1, "c")]
    assert [choice["text"] for choice in two["choices"]] == ["c", "ab"] * 2
    assert [choice["index"] for choice in two["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in one["choices"])
    assert one["usage"]["completion_tokens"] == 2 * 4  # what was made, told or not
    assert {each.n for each in engine.submitted} == {3}


@pytest.mark.parametrize("prompt", [PROMPT, ids_of(PROMPT)], ids=["text", "ids"])
def test_prompt_logprobs(prompt: Any) -> None:
    with api(say(ANSWER)) as (client, engine):
        found = [
            choice["prompt_logprobs"]
            for choice in whole(client, prompt=[prompt] * 2, n=2, prompt_logprobs=3, max_tokens=5)["choices"]
        ]
        none = whole(client, prompt=prompt, prompt_logprobs=0)["choices"][0]["prompt_logprobs"]
    ids = ids_of(PROMPT)
    assert all(each == found[0] for each in found)
    assert len(found) == 4 and len(found[0]) == len(ids) and found[0][0] is None
    for token, entry in zip(ids[1:], found[0][1:], strict=True):
        assert entry[str(token)] == {"logprob": -1.0, "rank": 2, "decoded_token": tokenizer_text([token])}
        assert len(entry) == 3
        assert [each["rank"] for each in entry.values()] == [1, 2, 3]
    assert none == [None, *({str(token): found[0][i][str(token)]} for i, token in enumerate(ids) if i)]
    assert [each.sampling.prompt_logprobs for each in engine.submitted] == [3, 3, 0]


def test_prompt_logprobs_next_to_an_echo() -> None:
    """Each has as many as it was asked for."""
    with api(say(ANSWER)) as (client, engine):
        body = {"prompt": ids_of(PROMPT), "echo": True, "max_tokens": 0}
        for prompt_logprobs, logprobs in ((5, 1), (1, 5)):
            response = client.post(ROUTE, {**body, "prompt_logprobs": prompt_logprobs, "logprobs": logprobs})
            (choice,) = response.json()["choices"]
            assert {len(entry) for entry in choice["prompt_logprobs"][1:]} == {max(prompt_logprobs, 2)}
            assert {len(entry) for entry in choice["logprobs"]["top_logprobs"][1:]} == {max(logprobs, 2)}
    assert {each.sampling.prompt_logprobs for each in engine.submitted} == {5}


def test_an_answer_holds_so_many_log_probabilities_of_its_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.answer.MAX_PROMPT_LOGPROBS", 3 * 10 * 2 * 2)
    prompts = [[5] * 10] * 2
    with api(say(ANSWER)) as (client, engine):
        whole(client, prompt=prompts, n=2, prompt_logprobs=2)
        complete(client, prompt=prompts, n=3, echo=True)  # without any
        assert refused(client, prompt=prompts, n=3, echo=True, logprobs=2)["param"] == "logprobs"
        response = client.post(ROUTE, {"prompt": prompts, "n": 2, "prompt_logprobs": 3})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt_logprobs")
    assert len(engine.submitted) == 3 * 2


def test_bans_reach_the_engine() -> None:
    with api(say(ANSWER)) as (client, engine):
        complete(client, prompt=PROMPT, allowed_token_ids=[7, 5, 7], bad_words=["is", "Paris"])
    sampling = engine.submitted[0].sampling
    assert sampling.allowed_token_ids == (7, 5)
    # " Paris" is a space and "Paris": one ban is enough. " is" is a token of its own.
    assert ids_of(" Paris")[1:] == ids_of("Paris")
    assert set(sampling.bad_words) == {tuple(ids_of(text)) for text in ("is", " is", "Paris")}


def test_priorities_where_the_operator_wants_them() -> None:
    engine = FakeEngine(say(ANSWER))
    complete(Api(services(engine, honour_priority=True)), prompt=PROMPT, priority=-5)
    assert engine.submitted[0].priority == -5
    with api(say(ANSWER)) as (client, _):
        complete(client, prompt=PROMPT, priority=0)


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncated_prompts(side: str) -> None:
    ids = ids_of(PROMPT)
    with api(say(ANSWER)) as (client, engine):
        body = {"truncate_prompt_tokens": 3, "truncation_side": side, "echo": True, "max_tokens": 1}
        texts = [complete(client, prompt=prompt, **body)["choices"][0]["text"] for prompt in (PROMPT, ids)]
        complete(client, prompt=ids, truncate_prompt_tokens=-1)
        complete(client, prompt=[5] * 500, truncate_prompt_tokens=-1, max_tokens=28)
        complete(client, prompt=[5] * 200, truncate_prompt_tokens=-1)
    kept = ids[-3:] if side == "left" else ids[:3]
    assert texts == [tokenizer_text([*kept, ids_of(ANSWER)[0]])] * 2
    submitted = [each.prompt.token_ids.tolist() for each in engine.submitted[::2]]
    assert submitted[:3] == [kept, kept, ids]
    assert [len(each) for each in submitted[3:]] == [MODEL.max_model_len - 28, MODEL.max_model_len - 16]


def test_truncation_keeps_special_tokens_like_the_library() -> None:
    own = build_tokenizer()
    backend = own.backend_tokenizer
    backend.post_processor = TemplateProcessing(single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)])
    for side in ("left", "right"):
        for keep in (3, 4, 100):
            own.truncation_side = side
            expected = own(PROMPT, truncation=True, max_length=keep)["input_ids"]
            engine = FakeEngine(say(ANSWER))
            client = Api(services(engine, tokenizer=Tokenizer(own)))
            complete(client, prompt=PROMPT, truncate_prompt_tokens=keep, truncation_side=side)
            assert engine.submitted[0].prompt.token_ids.tolist() == expected


def test_embeddings_are_not_truncated() -> None:
    with api(say(ANSWER)) as (client, _):
        error = refused(client, prompt_embeds=embedding(2)[0], truncate_prompt_tokens=1)
    assert error["param"] == "truncate_prompt_tokens"


def test_strict_servers() -> None:
    client = Api(services(FakeEngine(say(ANSWER)), strict_params=True))
    complete(client, prompt=PROMPT, user="x", seed=1)
    assert refused(client, prompt=PROMPT, tempersture=1)["code"] == "unknown_parameter"


def test_many_logprobs_are_written_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def record(self: LogprobFormat, records: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return original(self, records)

    original = LogprobFormat.completion
    monkeypatch.setattr(LogprobFormat, "completion", record)
    with api(say(ANSWER)) as (client, _):
        body = {"prompt": [5] * 100, "n": 6, "max_tokens": 0, "echo": True, "logprobs": 1}
        complete(client, **body)
    assert threads == [False] * 6 + [True] * 6  # together more than 512 records; one by one fewer


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
