"""Clients that leave, processes that die and input that is wrong, with the real runner behind the server."""

from __future__ import annotations

import http.client
import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.integration.real_server import RealServer, as_safetensors, as_torch_file
from tests.models import HIDDEN_SIZE, MAX_POSITIONS, VOCAB_SIZE, embed
from tests.server.harness import Stream, eventually

JSON = {"Content-Type": "application/json"}
LONG = 400
"""Tokens: half a second's."""
MANY = 128
"""Choices. Where there are fewer slots, some of so many long ones are waiting for a minute."""


def long_answer(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": [5, 6, 7], "max_tokens": LONG, "ignore_eos": True, **fields}


def stream(server: RealServer, **fields: Any) -> Stream:
    return Stream(server.port, "/v1/completions", long_answer(stream=True, **fields))


@pytest.fixture(scope="module")
def narrow(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """One slot, and a queue of one."""
    folder = tmp_path_factory.mktemp("narrow")
    with RealServer(folder, llama, dtype="float32", max_num_seqs=1, max_queue=1) as server:
        yield server.wait_ready()


def test_a_client_that_leaves_frees_its_slot(narrow: RealServer) -> None:
    """And its places in the queue, whether it has seen anything of its answer or not."""
    before = narrow.gauge("generation_tokens_total")
    running = stream(narrow, n=MANY)
    next(running.events)
    eventually(lambda: narrow.gauge("num_requests_running") > 0)
    running.close()
    eventually(narrow.is_idle)
    connection = http.client.HTTPConnection("127.0.0.1", narrow.port, timeout=30)
    connection.request("POST", "/v1/completions", json.dumps(long_answer(n=MANY)), JSON)
    eventually(lambda: narrow.gauge("num_requests_running") > 0)
    connection.close()
    eventually(narrow.is_idle)
    assert narrow.gauge("generation_tokens_total") - before < LONG * MANY  # Neither came to its end.


def test_the_runner_s_death_reaches_every_client(llama: Path, tmp_path: Path) -> None:
    """The one whose answer is coming, and those who wait in the queue."""
    with RealServer(tmp_path, llama, dtype="float32", max_num_seqs=1) as server:
        server.wait_ready()
        open_streams = [stream(server, n=n) for n in (MANY, 1, 2)]
        next(open_streams[0].events)
        server.signal_runner(signal.SIGKILL)
        for each in open_streams:
            *_, error, done = each.rest()
            assert "message" in json.loads(error)["error"]
            assert done == "[DONE]"
        assert server.exit_status() != 0
        assert not server.leftovers()


def test_sigterm_lets_streams_finish(llama: Path, tmp_path: Path) -> None:
    with RealServer(tmp_path, llama, dtype="float32") as server:
        server.wait_ready()
        running = stream(server)
        next(running.events)
        runner = server.runner_pid
        server.signal(signal.SIGTERM)
        eventually(lambda: server.status("/readyz") in (503, 0))
        *_, last, done = running.rest()
        assert json.loads(last)["choices"][0]["finish_reason"] == "length"
        assert done == "[DONE]"
        assert server.exit_status() == 0
        assert not Path(f"/proc/{runner}").exists()


def test_a_full_queue_is_429(narrow: RealServer) -> None:
    running = stream(narrow)
    next(running.events)
    queued = stream(narrow, n=MANY)  # all of them: there is still a place
    third = stream(narrow)
    assert (queued.response.status, third.response.status) == (200, 429)
    assert third.response.getheader("Retry-After")
    assert json.loads(third.response.read())["error"]["code"]
    for each in (third, running, queued):
        each.close()
    eventually(narrow.is_idle)


def rows(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape)


def nan_rows() -> torch.Tensor:
    bad = rows(3, HIDDEN_SIZE)
    bad[1, 5] = torch.nan
    return bad


def base64_of(what: Any) -> str:
    import base64
    import io

    buffer = io.BytesIO()
    torch.save(what, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


BAD_EMBEDS: dict[str, Any] = {
    "wrong width": as_safetensors(rows(3, HIDDEN_SIZE + 1)),
    "no rows": as_safetensors(rows(0, HIDDEN_SIZE)),
    "one dimension": as_safetensors(rows(HIDDEN_SIZE)),
    "four dimensions": as_safetensors(rows(1, 1, 3, HIDDEN_SIZE)),
    "two prompts in one": as_safetensors(rows(2, 3, HIDDEN_SIZE)),
    "integers": as_safetensors(rows(3, HIDDEN_SIZE).int()),
    "float64": as_safetensors(rows(3, HIDDEN_SIZE).double()),
    "nan": as_safetensors(nan_rows()),
    "infinity": as_safetensors(nan_rows() / 0),
    "expanded": base64_of(torch.zeros(1).expand(3, HIDDEN_SIZE)),
    "strided": base64_of(torch.zeros(HIDDEN_SIZE, 3).T),
    "sparse": base64_of(torch.eye(HIDDEN_SIZE).to_sparse()),
    "a list": base64_of([1, 2, 3]),
    "a module": base64_of({"weight": torch.zeros(3, HIDDEN_SIZE)}),
    "cut off": as_torch_file(rows(3, HIDDEN_SIZE))[:-400],
    "not base64": "!!!!",
    "nothing": "",
    "an empty list": [],
    "a number": 5,
    "too long": as_safetensors(rows(MAX_POSITIONS + 1, HIDDEN_SIZE)),
}


@pytest.mark.parametrize("name", BAD_EMBEDS)
def test_a_bad_embedding_is_a_400(server: RealServer, name: str) -> None:
    with server.client() as client:
        response = client.post("/v1/completions", json={"model": "m", "prompt_embeds": BAD_EMBEDS[name]})
        _assert_error(response, 400)
        _assert_alive(client)


BAD_BODIES: dict[str, tuple[str, int]] = {
    "id too large": (f'{{"model":"m","prompt":[{VOCAB_SIZE}]}}', 400),
    "negative id": ('{"model":"m","prompt":[-1]}', 400),
    "id past int64": ('{"model":"m","prompt":[1180591620717411303424]}', 400),
    "boolean id": ('{"model":"m","prompt":[true]}', 400),
    "empty prompt list": ('{"model":"m","prompt":[]}', 400),
    "empty inner prompt": ('{"model":"m","prompt":[[]]}', 400),
    "no prompt": ('{"model":"m"}', 400),
    "nan": ('{"model":"m","prompt":"a","temperature":NaN}', 400),
    "infinity": ('{"model":"m","prompt":"a","temperature":1e999}', 400),
    "n nan": ('{"model":"m","prompt":"a","n":NaN}', 400),
    "lone surrogate": ('{"model":"m","prompt":"\\ud800"}', 400),
    "lone surrogate in the wrong place": ('{"model":"m","prompt":"a","n":"\\ud800"}', 400),
    "not json": ("{", 400),
    "not an object": ("[]", 400),
    "deep": ("[" * 100_000, 400),
    "bias past the vocabulary": (f'{{"model":"m","prompt":"a","logit_bias":{{"{VOCAB_SIZE}":1}}}}', 400),
    "stop id past the vocabulary": (f'{{"model":"m","prompt":"a","stop_token_ids":[{VOCAB_SIZE}]}}', 400),
    "too many tokens": (f'{{"model":"m","prompt":"a","max_tokens":{MAX_POSITIONS}}}', 400),
    "another model": ('{"model":"x","prompt":"a"}', 404),
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_a_bad_body_is_a_4xx(server: RealServer, name: str) -> None:
    body, status = BAD_BODIES[name]
    with server.client() as client:
        response = client.post("/v1/completions", content=body, headers=JSON)
        _assert_error(response, status)
        _assert_alive(client)


def test_a_prompt_longer_than_the_context(server: RealServer, llama: Path) -> None:
    ids = [5] * (MAX_POSITIONS + 1)
    with server.client() as client:
        rows = embed(llama, ids)
        for prompt in (
            {"prompt": ids},
            {"prompt_embeds": as_safetensors(rows[:MAX_POSITIONS])},
            {"prompt_embeds": as_safetensors(rows)},
            {"prompt_embeds": as_torch_file(rows)},
        ):
            response = client.post("/v1/completions", json={"model": "m", **prompt})
            assert _assert_error(response, 400)["code"] == "context_length_exceeded"


def test_routes_and_media_types(server: RealServer) -> None:
    with server.client() as client:
        _assert_error(client.get("/nothing/here"), 404)
        _assert_error(client.get("/v1/completions"), 405)
        _assert_error(client.post("/v1/completions", content="{}", headers={"Content-Type": "text/plain"}), 415)
        # Refused by its declared length: the body is never waited for.
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {1 << 30}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(head.encode())
            assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


def _assert_error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text[:300]
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and len(response.content) <= 4096
    return error


def _assert_alive(client: httpx.Client) -> None:
    response = client.post("/v1/completions", json={"model": "m", "prompt": [5, 6], "max_tokens": 1})
    assert response.status_code == 200
