"""Limits and turns by API key, over two API processes and a real runner."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.torch
import torch

from tests.integration.real_server import RealServer
from tests.models import HIDDEN_SIZE
from tests.server.harness import Stream, eventually

KEYS = (
    "operator name=operator",
    "crowd name=crowd",
    "single",
    "careful concurrency=1",
    "slow requests=2",
    "poor name=poor tokens=20",
    "uploader requests=2",
    "looker tokens=20",
)
MANY = 64
"""Choices: with one slot, and 300 tokens each, they take half a minute and more."""


class GuardedServer(RealServer):
    def client(self, **options: Any) -> httpx.Client:
        return super().client(headers={"Authorization": "Bearer operator"}, **options)

    def stream(self, key: str, max_tokens: int = 300, prompt: int = 3, **fields: Any) -> Stream:
        """Each over a connection of its own, so that they go to the API processes in turn."""
        body = {"model": "m", "prompt": [5] * prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        return Stream(self.port, "/v1/completions", body | fields, {"Authorization": f"Bearer {key}"})

    def status_for(self, key: str, **fields: Any) -> int:
        stream = self.stream(key, **{"max_tokens": 2, **fields})
        stream.rest()
        return stream.response.status


@pytest.fixture(scope="module")
def server(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedServer]:
    folder = tmp_path_factory.mktemp("admission")
    options = {"dtype": "float32", "max_num_seqs": 1, "max_queued_tokens": 600}
    with GuardedServer(folder, llama, api_workers=2, api_keys=KEYS, **options) as server:
        yield server.wait_ready()


def refused(stream: Stream) -> tuple[int, str, int]:
    """Status, code and Retry-After."""
    error = json.loads(stream.response.read())["error"]
    stream.close()
    return stream.response.status, error["code"], int(stream.response.getheader("Retry-After") or 0)


def test_one_key_s_queue_makes_no_other_key_wait(server: GuardedServer) -> None:
    crowd = [server.stream("crowd", n=MANY) for _ in range(4)]
    next(crowd[0].events)
    eventually(lambda: server.gauge("num_requests_waiting") > 3 * MANY)
    single = server.stream("single", max_tokens=5)
    assert single.rest()[-1] == "[DONE]"
    # First come, first served would have let all of them go before.
    assert server.gauge("num_requests_waiting") > MANY
    for each in crowd:
        each.close()
    eventually(server.is_idle)


def test_requests_at_once(server: GuardedServer) -> None:
    running = server.stream("careful", n=MANY)
    next(running.events)
    for _ in range(4):
        assert refused(server.stream("careful")) == (429, "rate_limit_exceeded", 1)
    other = server.stream("single", max_tokens=1)
    running.close()
    assert other.rest()[-1] == "[DONE]"
    eventually(lambda: server.status_for("careful") == 200)
    eventually(server.is_idle)


def test_requests_a_minute(server: GuardedServer) -> None:
    assert [server.status_for("slow") for _ in range(2)] == [200, 200]
    for _ in range(3):
        status, code, wait = refused(server.stream("slow"))
        assert (status, code) == (429, "rate_limit_exceeded")
        assert 0 < wait <= 30


def test_tokens_a_minute(server: GuardedServer) -> None:
    assert server.status_for("poor", prompt=10) == 200
    assert server.status_for("poor", prompt=2, max_tokens=30) == 200
    eventually(server.is_idle)
    status, code, wait = refused(server.stream("poor"))
    assert (status, code) == (429, "rate_limit_exceeded")
    assert 30 < wait <= 90


def test_what_needs_no_slot(server: GuardedServer) -> None:
    """Uploads are requests; look-ups are, too, and their rows are tokens."""
    file = safetensors.torch.save({"rows": torch.zeros(3, HIDDEN_SIZE)})
    posts: dict[str, tuple[str, dict[str, Any]]] = {
        "uploader": ("/v1/prompt_embeds", {"content": file}),
        "looker": ("/v1/token_embeddings", {"json": {"input": [5] * 12}}),
    }
    with server.client() as client:
        for key, (path, what) in posts.items():
            kind = "application/octet-stream" if "content" in what else "application/json"
            headers = {"Authorization": f"Bearer {key}", "Content-Type": kind}
            answers = [client.post(path, headers=headers, **what) for _ in range(3)]
            assert [each.status_code for each in answers] == [200, 200, 429], answers[-1].text
            assert answers[2].json()["error"]["code"] == "rate_limit_exceeded"
            assert "a minute" in answers[2].json()["error"]["message"]
            assert 0 < int(answers[2].headers["Retry-After"]) <= 30
        assert client.get("/v1/prompt_embeds", headers={"Authorization": "Bearer uploader"}).status_code == 200
        text = client.get("/metrics").text
    assert re.search(r'admission_rejections_total{model_name="m",reason="rate_limit"} [2-9]', text)


def test_a_queue_that_is_full_of_tokens(server: GuardedServer) -> None:
    running = server.stream("crowd", n=MANY)
    next(running.events)
    queued = [server.stream("crowd", prompt=200) for _ in range(2)]
    assert refused(server.stream("single", prompt=201))[:2] == (429, "rate_limit_exceeded")
    with server.client() as client:
        text = client.get("/metrics").text
    assert 'intarsia:admission_rejections_total{model_name="m",reason="tokens_full"} 1.0' in text
    for each in [*queued, running]:
        each.close()
    # Not `is_idle`, which may be of a heartbeat before all of this.
    eventually(lambda: server.status_for("single", prompt=300) == 200)
