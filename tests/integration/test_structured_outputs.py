"""Answers of an asked-for form, from a real server and runner: judged by jsonschema, by `re` and by the choices."""

from __future__ import annotations

import json
import random
import re
import socket
import string
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.integration.real_server import RealServer, as_safetensors
from tests.models import clear_prompt, embed, hf_generate
from tests.server.harness import Stream, eventually

PROMPT = list(range(40, 60))


@pytest.fixture(scope="module")
def client(server: RealServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def complete(client: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 450, "temperature": 1.0, **fields}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    choices: list[dict[str, Any]] = response.json()["choices"]
    return choices


def make_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    """A random schema whose answers are short: a random model would go on for ever where it may."""
    kinds = ["integer", "number", "string", "pattern", "boolean", "null", "enum", "const", "date"]
    kind = rng.choice([*kinds, *["object", "array", "anyOf"] * 4] if depth else kinds)
    if kind == "integer":
        low = rng.randint(-500, 500)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 1000)}
    if kind == "number":
        return {"type": "number", "minimum": -1, "maximum": rng.choice([0, 2.5, 100])}
    if kind == "string":
        return {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(3, 8)}
    if kind == "pattern":
        return {
            "type": "string",
            "pattern": rng.choice(["^[a-z]{2,5}$", "^\\d{3}-\\d{2}$", "^(x|yy)+z{0,2}$"]),
            "maxLength": 12,
        }
    if kind == "enum":
        return {"enum": rng.sample(["oak", "elm", 1, 2.5, None, True, "é\n"], rng.randint(1, 4))}
    if kind == "const":
        return {"const": rng.choice(["fixed", 7, [1, {"a": None}]])}
    if kind == "date":
        return {"type": "string", "format": rng.choice(["date", "uuid", "ipv4"])}
    if kind == "array":
        low = rng.randint(0, 2)
        items = make_schema(rng, depth - 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + rng.randint(0, 2)}
    if kind == "anyOf":
        return {"anyOf": [make_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
    if kind == "object":
        names = rng.sample(string.ascii_lowercase, rng.randint(0, 3))
        properties = {name: make_schema(rng, depth - 1) for name in names}
        required = [name for name in names if rng.random() < 0.7]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": kind}


def test_random_schemas(server: RealServer, client: httpx.Client) -> None:
    rng = random.Random(7)
    schemas = [make_schema(rng, 3) for _ in range(24)]

    def ask(number: int) -> list[dict[str, Any]]:
        asked = {"json": schemas[number], "disable_any_whitespace": True}
        return complete(client, structured_outputs=asked, n=2, seed=number, prompt=PROMPT[: 3 + number % 5])

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(len(schemas))))
    finished = 0
    for schema, choices in zip(schemas, answers, strict=True):
        for choice in choices:
            if choice["finish_reason"] == "stop":
                finished += 1
                jsonschema.validate(json.loads(choice["text"]), schema, format_checker=jsonschema.FormatChecker())
    assert finished > 40  # a random model may write numbers without end
    eventually(server.is_idle, 10)


class Leaf(BaseModel):
    shape: Literal["round", "long"]


class Tree(BaseModel):
    kind: Literal["oak", "elm"]
    age: Annotated[int, Field(ge=0, le=999)]
    leaves: Annotated[list[Leaf], Field(max_length=2)]
    healthy: bool | None


def test_openai_s_own_parser(server: RealServer) -> None:
    """A pydantic model in, an instance out, whole and streamed."""
    asked: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": "Describe an oak."}],
        "seed": 6,
        "max_tokens": 300,
    }
    with openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.parse(response_format=Tree, **asked)
        with client.chat.completions.stream(response_format=Tree, **asked) as stream:
            streamed = stream.get_final_completion()
    assert isinstance(whole.choices[0].message.parsed, Tree)
    assert streamed.choices[0].message.parsed == whole.choices[0].message.parsed


def test_any_object(client: httpx.Client) -> None:
    for seed in range(6):
        body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "seed": seed, "max_tokens": 300}
        response = client.post("/v1/chat/completions", json=body | {"response_format": {"type": "json_object"}})
        (choice,) = response.json()["choices"]
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)
            return
    raise AssertionError("six objects without end")


@pytest.mark.parametrize(
    "pattern", ["(yes|no|maybe)", "[a-z]{3,6}@[a-z]{2,5}\\.(org|net)", "\\d{3}[ -]\\d{4}", "é+😀{1,2}"]
)
def test_regex(client: httpx.Client, pattern: str) -> None:
    for choice in complete(client, guided_regex=pattern, n=3, seed=1):
        assert choice["finish_reason"] == "stop" and choice["stop_reason"] is None
        assert re.fullmatch(pattern, choice["text"])


def test_choices_and_grammars(client: httpx.Client) -> None:
    options = ["oak", "oak tree", 'quo"te', "new\nline", "é", "\\d+"]
    said = {choice["text"] for choice in complete(client, guided_choice=options, n=40, seed=1)}
    assert said <= set(options) and len(said) > 1
    (choice,) = complete(client, structured_outputs={"grammar": 'root ::= "<" [ab]{3} ">" ("," root)?'}, seed=3)
    assert re.fullmatch("<[ab]{3}>(,<[ab]{3}>)*", choice["text"])
    embedded = {"prompt": None, "prompt_embeds": as_safetensors(embed_rows())}
    (choice,) = complete(client, structured_outputs={"choice": options}, **embedded)
    assert choice["text"] in options


def embed_rows() -> Any:
    import torch

    from tests.models import HIDDEN_SIZE

    return torch.randn(5, HIDDEN_SIZE, generator=torch.Generator().manual_seed(0))


def test_streamed_text_is_the_whole_text(server: RealServer, client: httpx.Client) -> None:
    asked = {"guided_regex": "(é|😀|ab){3,9}!", "seed": 11, "n": 2, "logprobs": 1, "return_token_ids": True}
    whole = complete(client, **asked)
    stream = Stream(
        server.port,
        "/v1/completions",
        {"model": "m", "prompt": PROMPT, "max_tokens": 450, "temperature": 1.0, "stream": True, **asked},
    )
    *chunks, done = stream.rest()
    assert done == "[DONE]"
    parts = [choice for chunk in chunks for choice in json.loads(chunk)["choices"]]
    for choice in whole:
        mine = [part for part in parts if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        assert [token for part in mine for token in part["token_ids"]] == choice["token_ids"]
        assert all("\ufffd" not in part["text"] for part in mine)
        assert [part["finish_reason"] for part in mine][-1] == choice["finish_reason"] == "stop"
        assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"])


def test_unconstrained_neighbours_answer_as_ever(server: RealServer, client: httpx.Client, llama: Path) -> None:
    prompts = [clear_prompt(llama, 6 + 5 * i, seed=70 + i, max_new_tokens=24) for i in range(4)]
    expected = [hf_generate(llama, ids, 24, ignore_eos=True) for ids in prompts]
    greedy = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}

    def ask(i: int) -> Any:
        if i % 2:
            return complete(client, guided_regex="[a-z]{30}", seed=i)[0]["text"]
        prompt: dict[str, Any] = {"prompt": prompts[i // 2]}
        if i % 4:
            prompt = {"prompt": None, "prompt_embeds": as_safetensors(embed(llama, prompts[i // 2]))}
        return complete(client, **prompt, **greedy)[0]["token_ids"]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    assert answers[::2] == expected
    assert all(re.fullmatch("[a-z]{30}", text) for text in answers[1::2])


def test_hostile_requests_while_others_stream(server: RealServer, client: httpx.Client) -> None:
    running = Stream(
        server.port,
        "/v1/completions",
        {"model": "m", "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True},
    )
    next(running.events)
    strings = {"allOf": [{"type": "string", "pattern": f".*{letter}.*"} for letter in "abcdefghijklmnopqrst"]}
    hostile: list[dict[str, Any]] = [
        {"guided_regex": "foo**"},
        {"guided_json": {"$ref": "#"}},
        {"guided_json": '{"items":' * 10_000 + "{}" + "}" * 10_000},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": strings}}},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    ]
    with ThreadPoolExecutor(len(hostile)) as pool:
        bodies = [{"model": "m", "prompt": PROMPT, **fields} for fields in hostile]
        answers = list(pool.map(lambda body: client.post("/v1/completions", json=body), bodies))
    for body, answer in zip(hostile, answers, strict=True):
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["type"] == "invalid_request_error", answer.text
        assert error["param"].partition(".")[0] in body
    assert running.rest()[-1] == "[DONE]"
    assert complete(client, guided_regex="ok")[0]["text"] == "ok"
    eventually(server.is_idle, 10)


def test_too_complex_on_the_way_is_an_error_of_that_request(server: RealServer, client: httpx.Client) -> None:
    ambiguous = "start: a\na: a a a | a a | /[a-z]/"
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "guided_grammar": ambiguous}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 400 and response.json()["error"]["code"] == "generation_failed"
    assert "too complex" in response.json()["error"]["message"]
    *_, error, done = Stream(server.port, "/v1/completions", {**body, "stream": True}).rest()
    assert "too complex" in json.loads(error)["error"]["message"] and done == "[DONE]"
    assert complete(client, guided_choice=["still here"])[0]["text"] == "still here"


def test_a_client_that_leaves(server: RealServer) -> None:
    """In the middle of its grammar, and while it is being compiled."""
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 450, "n": 4, "stream": True, "guided_regex": "(a|b)*"}
    running = Stream(server.port, "/v1/completions", body | {"ignore_eos": True})
    next(running.events)
    running.close()
    for i in range(4):
        content = json.dumps(body | {"guided_regex": f"(a|b)*{i}"}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
    eventually(server.is_idle, 20)
    with server.client() as client:
        assert complete(client, guided_regex="a{3}")[0]["text"] == "aaa"
