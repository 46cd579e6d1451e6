"""A runner that stalls, a runner that dies, and servers that are told to stop while streams run."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faults.faulty_server import SLOTS, FaultyServer
from tests.faults.traffic import Traffic
from tests.server.harness import Stream, eventually, is_alive

LONG: dict[str, Any] = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 450, "ignore_eos": True, "stream": True}


def open_streams(server: FaultyServer, count: int) -> list[Stream]:
    streams = [Stream(server.port, "/v1/completions", LONG) for _ in range(count)]
    for stream in streams:
        next(stream.events)
    return streams


def assert_complete(stream: Stream) -> None:
    *_, last, done = stream.rest()
    assert done == "[DONE]"
    assert json.loads(last)["choices"][0]["finish_reason"] == "length"


def test_a_stall_is_noticed_and_survived_and_a_drain_finishes_streams(llama: Path, tmp_path: Path) -> None:
    with FaultyServer(tmp_path, llama, ready_seconds=2.0, live_seconds=6.0) as server:
        server.wait_ready()
        runner = server.runner_pid
        (stream,) = open_streams(server, 1)
        server.signal_runner(signal.SIGSTOP)
        eventually(lambda: server.status("/readyz") == 503)
        assert server.status("/livez") == 200  # It may come back, and does not want to be restarted yet.
        assert server.status("/metrics") == 200
        eventually(lambda: server.status("/livez") == 503)
        refused = httpx.post(f"{server.base}/v1/completions", json=LONG, timeout=30)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "overloaded"
        assert int(refused.headers["retry-after"]) > 0
        server.signal_runner(signal.SIGCONT)
        eventually(lambda: server.status("/readyz") == 200)
        assert_complete(stream)
        server.assert_well()

        streams = open_streams(server, 3)
        server.signal(signal.SIGTERM)
        eventually(lambda: server.status("/readyz") in (503, 0))
        for stream in streams:
            assert_complete(stream)
        assert server.exit_status() == 0
        assert not is_alive(runner)
        assert not server.leftovers()
        assert server.errors_of_ours() == []


@pytest.mark.long
def test_a_second_sigterm_is_quick(llama: Path, tmp_path: Path) -> None:
    """Without it the server would exit with 0, in the end."""
    with FaultyServer(tmp_path, llama, shutdown_timeout=300) as server:
        server.wait_ready()
        runner, stream = server.runner_pid, Stream(server.port, "/v1/completions", LONG | {"n": 16 * SLOTS})
        next(stream.events)
        server.signal(signal.SIGTERM)
        eventually(lambda: server.status("/readyz") in (503, 0))
        server.signal(signal.SIGTERM)
        assert server.exit_status() == 1
        eventually(lambda: not is_alive(runner))
        assert not server.leftovers()
        stream.close()


def ask(server: FaultyServer, path: str, body: dict[str, Any]) -> str:
    """How it ended for the client."""
    try:
        answer = httpx.post(server.base + path, json=body, timeout=60)
    except httpx.TransportError:
        return "no connection"  # After the end.
    if answer.status_code == 200 and body["stream"]:
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        responses = path == "/v1/responses"
        assert responses or lines.pop() == "[DONE]"
        failed = '"response.failed"' in lines[-1] if responses else '"error"' in lines[-1]
        return "error event" if failed else "answered"
    if answer.status_code == 200:
        return "answered"
    assert answer.status_code in (429, 503)
    return str(answer.json()["error"]["code"])


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_killed_in_the_middle_of_everything(llama: Path, tmp_path: Path, seed: int) -> None:
    traffic = Traffic(llama, seed, max_tokens=300)
    with FaultyServer(tmp_path, llama) as server, ThreadPoolExecutor(32) as pool:
        server.wait_ready()
        asked = [pool.submit(ask, server, *traffic.draw()) for _ in range(60)]
        eventually(lambda: sum(each.done() for each in asked) > 2 + 4 * seed)
        server.signal_runner(signal.SIGKILL)
        assert server.exit_status(30) == 1
        ends = {each.result() for each in asked}
        assert ends & {"error event", "engine_failed"}
        assert ends <= {
            "answered",
            "error event",
            "engine_failed",
            "rate_limit_exceeded",
            "overloaded",
            "no connection",
        }
        assert "the runner has stopped" in server.stderr
        assert not server.leftovers()
