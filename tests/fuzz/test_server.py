"""Ten thousand hostile requests against a real server with the real runner: each is refused with a 4xx (or is good
after all), memory stays bounded, and the server answers as before.

A run of `make test` sends 500 of them; `make fuzz` 10,000, the environment's FUZZ_COUNT any other number.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fuzz.files import TRACE
from tests.fuzz.requests import Sent, request, send
from tests.integration.real_server import RealServer
from tests.models import Family
from tests.server.harness import eventually

SHORT_COUNT, LONG_COUNT = 500, 10_000
CAP = 16 << 20
"""Of a body."""
WARM_UP = range(1_000_000, 1_000_060)
"""Requests after which pools, caches and heaps are as large as they get."""
GOOD = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tiny_model: Callable[[Family], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("fuzz")
    options = {"max_body_bytes": CAP, "max_stored_bytes": 1 << 20, "enable_prefix_caching": False}
    with RealServer(folder, tiny_model("llama"), dtype="float32", **options) as server:
        yield server.wait_ready()


@pytest.fixture
def count(long_run: bool) -> int:
    return int(os.environ.get("FUZZ_COUNT", LONG_COUNT if long_run else SHORT_COUNT))


@pytest.mark.fuzz
@pytest.mark.timeout(3600)
def test_hostile_requests_are_refused(server: RealServer, count: int) -> None:
    before = answer(server)
    for number in WARM_UP:
        send(server.port, request(number))
    pids = (server.process.pid, server.runner_pid)
    resident = [reset_peak(pid) for pid in pids]
    statuses: Counter[int] = Counter()
    for number in range(count):
        status = check(server.port, request(number), number)
        statuses[status] += 1
        assert server.process.poll() is None, f"request {number} ended the server"
    grown = [peak(pid) - size for pid, size in zip(pids, resident, strict=True)]
    print(f"{dict(statuses)}; grown by at most {grown} bytes of {2 * CAP}")
    assert max(grown) <= 2 * CAP, f"the processes grew by {grown} bytes"
    # Requests that all die at the first check would prove nothing.
    assert statuses[200] >= count // 50
    assert statuses[400] >= count // 2
    assert not TRACE.exists()
    with server.client() as client:
        eventually(lambda: client.get("/load").json()["server_load"] <= 1)
        eventually(server.is_idle)
        assert client.get("/readyz").status_code == 200
    assert answer(server) == before
    assert "unexpected" not in server.stderr  # what an InternalError logs


def check(port: int, sent: Sent, number: int) -> int:
    """The status; 0 where there is no answer, and none is due."""
    got = send(port, sent)
    if got is None:
        # A cut upload has nobody to answer, and what is sent behind a body's end is a request of its own.
        assert sent.length is not None, f"request {number} was not answered"
        return 0
    assert got.status == 200 or 400 <= got.status < 500, f"request {number}: {got.status} {got.body[:300]!r}"
    assert got.status != 429, f"request {number} found the server full"
    body = json.loads(got.body)
    if got.status != 200:
        error = body["error"]
        assert set(error) == {"message", "type", "param", "code"}, f"request {number}"
        assert 0 < len(error["message"].encode()) <= 4096, f"request {number}"
    return got.status


def answer(server: RealServer) -> str:
    with server.client() as client:
        response = client.post("/v1/completions", json=GOOD)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])


def reset_peak(pid: int) -> int:
    """The process's resident bytes now, from which its peak is counted again."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _status(pid, "VmRSS")


def peak(pid: int) -> int:
    return _status(pid, "VmHWM")


def _status(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024
