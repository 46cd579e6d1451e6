"""POST /abort, over real connections: who may end an answer, and what its reader gets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.models import Family
from tests.server.conftest import StartServer
from tests.server.harness import ServerProcess, completion, eventually
from tests.server.scripted_runner import Script

KEYS = ("first", "second")


@pytest.fixture(scope="module")
def slow(tiny_model: Callable[[Family], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A token takes it a tenth of a second: nothing here is ever complete, 40 seconds later."""
    script = Script(model=str(tiny_model("llama")), step_seconds=0.1)
    with ServerProcess(script, tmp_path_factory.mktemp("slow"), api_keys=KEYS) as server:
        yield server.wait_ready()


def client_of(server: ServerProcess, key: str = KEYS[0]) -> httpx.Client:
    return server.client(headers={"Authorization": f"Bearer {key}"})


def events(response: httpx.Response) -> Iterator[str]:
    return (line.removeprefix("data: ") for line in response.iter_lines() if line)


@pytest.mark.parametrize("prompts", [1, 3])
@pytest.mark.parametrize("n", [1, 2])
def test_a_stream(slow: ServerProcess, prompts: int, n: int) -> None:
    body = completion(400, prompt=[[5, 6, 7]] * prompts, n=n, stream=True)
    with client_of(slow) as client, client.stream("POST", "/v1/completions", json=body) as response:
        stream = events(response)
        answer_id = json.loads(next(stream))["id"]
        assert client.get("/load").json() == {"server_load": 1}
        assert client.post("/abort", json={"id": answer_id}).json() == {"id": answer_id, "aborted": True}
        *chunks, error, done = stream
    assert done == "[DONE]"
    assert json.loads(error)["error"]["code"] == "request_aborted"
    assert all(choice["finish_reason"] is None for chunk in chunks for choice in json.loads(chunk)["choices"])
    assert len(slow.messages("abort_answer")[-1]["found"]) == prompts
    with client_of(slow) as client:
        eventually(lambda: client.get("/load").json() == {"server_load": 0})
        assert client.post("/abort", json={"id": answer_id}).status_code == 404, "only once"


def test_whose_it_is_not(slow: ServerProcess) -> None:
    body = completion(400, stream=True)
    with (
        client_of(slow) as client,
        client_of(slow, KEYS[1]) as other,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        stream = events(response)
        answer_id = json.loads(next(stream))["id"]
        refused = other.post("/abort", json={"id": answer_id})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")
        assert httpx.post(slow.base + "/abort", json={"id": answer_id}, timeout=60).status_code == 401
        assert json.loads(next(stream))["choices"]
        assert client.post("/abort", json={"id": answer_id}).status_code == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [({"id": "cmpl-" + "0" * 32}, 404), ({}, 400), ({"id": ""}, 400), ({"id": "x" * 129}, 400), ({"id": 5}, 400)],
)
def test_ids_that_are_none(slow: ServerProcess, body: dict[str, Any], status: int) -> None:
    with client_of(slow) as client:
        answer = client.post("/abort", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, "id")


def test_answers_that_have_ended_are_forgotten(slow: ServerProcess) -> None:
    with client_of(slow) as client:
        answer = client.post("/v1/completions", json=completion(2))
        assert answer.status_code == 200
        wanted = {"id": answer.json()["id"]}
        eventually(lambda: client.post("/abort", json=wanted).status_code == 404)


def test_an_answer_of_another_worker(start_server: StartServer) -> None:
    server = start_server({"step_seconds": 0.1}, api_workers=2, api_keys=KEYS).wait_ready()
    workers = set()
    for _ in range(3):
        body = completion(400, prompt=[[5, 6, 7]] * 2, n=2, stream=True)
        with client_of(server) as client, client.stream("POST", "/v1/completions", json=body) as response:
            stream = events(response)
            answer_id = json.loads(next(stream))["id"]
            # Connections are dealt out in turn: this one and the next come to both workers.
            for key, status in ((KEYS[1], 404), (KEYS[1], 404), (KEYS[0], 200)):
                with client_of(server, key) as other:
                    assert other.post("/abort", json={"id": answer_id}).status_code == status
            *_, error, done = stream
        assert (json.loads(error)["error"]["code"], done) == ("request_aborted", "[DONE]")
        made_by = server.messages("generate")[-1]["worker"]
        asked = server.messages("abort_answer")[-3:]
        assert [each["found"] for each in asked[:2]] == [[], []]
        assert {worker for worker, _ in asked[2]["found"]} == {made_by}
        workers.add((made_by, asked[2]["worker"]))
    assert any(made != asked for made, asked in workers)
    with client_of(server) as client:
        text = client.get("/metrics").text
    (ended,) = [line for line in text.splitlines() if line.startswith("intarsia:request_success") and "abort" in line]
    assert float(ended.split()[-1]) == 6


def test_ping(slow: ServerProcess) -> None:
    """As /health; whoever asks has no key."""
    assert httpx.get(slow.base + "/ping", timeout=60).json() == {"status": "ok"}
    assert httpx.get(slow.base + "/load", timeout=60).status_code == 401


def test_a_response(slow: ServerProcess) -> None:
    body = {"input": "hello", "max_output_tokens": 400, "ignore_eos": True, "stream": True}
    with client_of(slow) as client, client.stream("POST", "/v1/responses", json=body) as response:
        stream = (json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line.startswith("data"))
        answer_id = next(stream)["response"]["id"]
        assert client.post("/abort", json={"id": answer_id}).status_code == 200
        *_, last = stream
    assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "server_error")
    with client_of(slow) as client:
        assert client.get(f"/v1/responses/{answer_id}").status_code == 404
