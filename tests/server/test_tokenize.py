"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import pytest

from tests.models import BOS_ID, EOS_ID, VOCAB_SIZE
from tests.server.fakes import MODEL, Api, FakeEngine, api, byte_ids, ids_of, say, services

TEXT = "The capital of 🫠"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_there_and_back(prefix: str) -> None:
    with api(say("")) as (client, _):
        body = client.post(f"{prefix}/tokenize", {"model": "tiny", "prompt": TEXT}).json()
        text = client.post(f"{prefix}/detokenize", {"model": "tiny", "tokens": body["tokens"]}).json()
    assert body == {"count": len(ids_of(TEXT)), "max_model_len": MODEL.max_model_len, "tokens": ids_of(TEXT)}
    assert text == {"prompt": TEXT}


def test_strings() -> None:
    with api(say("")) as (client, _):
        body = client.post("/tokenize", {"prompt": " is", "return_token_strs": True}).json()
    assert body["token_strs"] == ["Ġis"]


def test_messages() -> None:
    with api(say("")) as (client, _):
        ids = client.post("/tokenize", {"messages": HELLO}).json()["tokens"]
        bare = client.post("/tokenize", {"messages": HELLO, "add_generation_prompt": False}).json()["tokens"]
        text = client.post("/detokenize", {"tokens": ids}).json()["prompt"]
    assert (ids[0], bare[-2:]) == (BOS_ID, [EOS_ID, *ids_of("\n")])
    assert text == "<bos><turn>user\nhello<eos>\n<turn>assistant\n"


def test_nothing_is_something_here() -> None:
    with api(say("")) as (client, _):
        assert client.post("/tokenize", {"prompt": ""}).json()["tokens"] == []
        assert client.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}
        assert client.post("/detokenize", {"tokens": byte_ids("é".encode())[:1]}).json() == {"prompt": "\ufffd"}


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/tokenize", {"prompt": "9" * 3_000_000}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "x", "documents": 5}, "documents"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [1.0]}, "tokens"),
        ("/detokenize", {"tokens": [[1]]}, "tokens"),
        ("/detokenize", {"tokens": [5] * (MODEL.max_model_len + 1)}, "tokens"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_bad_requests(route: str, body: dict[str, Any], param: str) -> None:
    with api(say("")) as (client, _):
        response = client.post(route, body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_other_models() -> None:
    with api(say("")) as (client, _):
        assert client.post("/tokenize", {"model": "x", "prompt": "x"}).status_code == 404
        assert client.post("/detokenize", {"model": "x", "tokens": []}).status_code == 404


@pytest.mark.parametrize(("route", "body"), [("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})])
def test_strict_servers(route: str, body: dict[str, Any]) -> None:
    client = Api(services(FakeEngine(say("")), strict_params=True))
    assert client.post(route, body).status_code == 200
    assert client.post(route, {**body, "promt": 1}).json()["error"]["code"] == "unknown_parameter"
