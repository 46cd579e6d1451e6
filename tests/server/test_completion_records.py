"""What completions say beside their text: log-probabilities, echoes, ids, and more than OpenAI has."""

from __future__ import annotations

import threading
import tracemalloc
from typing import Any

import pytest
from openai.types import Completion
from tokenizers.normalizers import Replace
from tokenizers.processors import TemplateProcessing

from runner.messages import TokenLogprobs
from server.answer_memory import AnswerMemory
from server.logprobs import LogprobFormat
from server.request_context import RequestContext, current_request
from server.tokenizer import Tokenizer
from tests.models import EOS_ID, build_tokenizer
from tests.server.completion_calls import ANSWER, PROMPT, ROUTE, complete, embedding, events, refused, tokenizer_text
from tests.server.fakes import MODEL, Api, FakeEngine, Line, api, byte_ids, ids_of, say, services

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


def test_log_probabilities_of_prompts_are_not_held_as_objects_for_every_choice() -> None:
    """All of an answer's were made before the first was written: ten times its JSON."""
    with api(say(ANSWER)) as (client, _):
        body = {"prompt": [5] * 100, "n": 64, "prompt_logprobs": 20, "max_tokens": 1}
        client.post(ROUTE, {**body, "n": 1})
        tracemalloc.start()
        try:
            response = client.post(ROUTE, body)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert response.status_code == 200
    assert peak < 4 * len(response.content)


def test_log_probabilities_of_prompts_count_among_what_answers_hold() -> None:
    engine, memory = FakeEngine(say(ANSWER)), AnswerMemory(50_000)
    client = Api(services(engine, answer_memory=memory))
    body = {"prompt": [5] * 100, "prompt_logprobs": 5, "max_tokens": 1}
    token = current_request.set(RequestContext(""))
    try:
        memory.used = 1  # others'
        assert client.post(ROUTE, body).status_code == 200
        assert memory.used > 100 * 6 * 50
        assert client.post(ROUTE, body).status_code == 429
    finally:
        current_request.reset(token)
    assert len(engine.submitted) == 1


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


def test_what_truncation_leaves_out_is_not_looked_at() -> None:
    """There may be millions of ids."""
    with api(say("x")) as (client, engine):
        complete(client, prompt=[*[-1] * 500, 5, 6, 7], truncate_prompt_tokens=3)
        assert engine.submitted[0].prompt.token_ids.tolist() == [5, 6, 7]


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
