"""POST …/render: the prompt of a request, as the request itself would send it to the engine."""

from __future__ import annotations

from typing import Any

import pytest

from server.chat_template import ChatTemplate
from tests.models import BOS_ID, VOCAB_SIZE
from tests.server.completion_calls import embedding
from tests.server.fakes import MODEL, Api, FakeEngine, api, ids_of, say, services, tokenizer

HELLO = [{"role": "user", "content": "hello"}]
TEXT = "What is the capital"


def both(client: Api, engine: FakeEngine, route: str, body: dict[str, Any]) -> Any:
    """What is rendered, after the request itself has been sent, too."""
    rendered = client.post(f"{route}/render", body)
    assert rendered.status_code == 200, rendered.text
    assert not engine.submitted
    assert client.post(route, body).status_code == 200
    return rendered.json()


@pytest.mark.parametrize(
    "prompt", [TEXT, [TEXT, "x"], ids_of(TEXT), [ids_of(TEXT), [5]]], ids=["1", "2", "ids", "2 ids"]
)
def test_completions(prompt: Any) -> None:
    with api(say("")) as (client, engine):
        found = both(client, engine, "/v1/completions", {"prompt": prompt, "stream": False})
    assert [each["token_ids"] for each in found] == [each.prompt.token_ids.tolist() for each in engine.submitted]
    first = {"model": "tiny", "prompt": TEXT, "token_ids": ids_of(TEXT), "count": len(ids_of(TEXT))}
    assert found[0] == {**first, "max_model_len": MODEL.max_model_len}


def test_embeddings_have_no_tokens() -> None:
    with api(say("")) as (client, engine):
        (found,) = both(client, engine, "/v1/completions", {"prompt_embeds": embedding(3)[0]})
    assert (found["count"], found["token_ids"], found["prompt"]) == (3, None, None)


def test_what_is_cut() -> None:
    with api(say("")) as (client, engine):
        (found,) = both(client, engine, "/v1/completions", {"prompt": TEXT, "truncate_prompt_tokens": 2})
    assert (found["token_ids"], found["count"]) == (ids_of(TEXT)[-2:], 2)
    assert TEXT.endswith(found["prompt"])


def test_chat() -> None:
    with api(say("")) as (client, engine):
        found = both(client, engine, "/v1/chat/completions", {"messages": HELLO, "max_tokens": 5})
    assert found["prompt"] == "<bos><turn>user\nhello<eos>\n<turn>assistant\n"
    assert found["token_ids"] == engine.submitted[0].prompt.token_ids.tolist()
    assert (found["token_ids"][0], found["count"]) == (BOS_ID, len(found["token_ids"]))


@pytest.mark.parametrize(
    ("route", "body", "status", "param"),
    [
        ("/v1/completions", {}, 400, "prompt"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 1000}, 400, "prompt"),
        ("/v1/completions", {"prompt": "x", "suffix": "y"}, 400, "suffix"),
        ("/v1/completions", {"prompt": [VOCAB_SIZE]}, 400, "prompt"),
        ("/v1/completions", {"prompt": "x", "stop_token_ids": [VOCAB_SIZE]}, 400, "stop_token_ids"),
        ("/v1/completions", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"messages": HELLO, "temperature": 3}, 400, "temperature"),
        ("/v1/chat/completions", {"messages": HELLO, "audio": {"voice": "x"}}, 400, "audio"),
    ],
)
def test_what_would_be_refused_is_refused(route: str, body: dict[str, Any], status: int, param: str) -> None:
    with api(say("")) as (client, _):
        rendered, sent = client.post(f"{route}/render", body), client.post(route, body)
    assert (rendered.status_code, rendered.json()["error"]["param"]) == (status, param)
    assert (sent.status_code, sent.json()) == (status, rendered.json())


def test_tokenizer_info() -> None:
    with api(say("")) as (client, _):
        info = client.get("/tokenizer_info").json()
        assert client.get("/v1/tokenizer_info").json() == info
    own = tokenizer().transformers
    assert (info["eos_token"], info["bos_token"], info["pad_token"]) == ("<eos>", "<bos>", "<pad>")
    assert info["chat_template"] == own.chat_template
    assert (info["vocab_size"], info["model_max_length"]) == (VOCAB_SIZE, MODEL.max_model_len)
    client = Api(services(FakeEngine(say("")), chat_template=ChatTemplate(tokenizer(), "{{ 'operator' }}")))
    assert client.get("/tokenizer_info").json()["chat_template"] == "{{ 'operator' }}"
