"""A client that goes away is noticed, whatever its request was doing, and the runner is told."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.models import Family
from tests.server.harness import ServerProcess, completion, eventually
from tests.server.scripted_runner import Script

ENDLESS = 480
"""Tokens: at a step of 100 ms longer than any test waits for what must come before."""
WAIT = 40.0


@pytest.fixture(scope="module")
def slow(tiny_model: Callable[[Family], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    script = Script(model=str(tiny_model("llama")), step_seconds=0.1)
    with ServerProcess(script, tmp_path_factory.mktemp("slow")) as server:
        yield server.wait_ready()


class Watch:
    """What has happened since the test began."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._before = {kind: len(server.messages(kind)) for kind in ("generate", "abort")}

    def requests(self, kind: str) -> set[int]:
        return {message["request"] for message in self._server.messages(kind)[self._before[kind] :]}

    def all_aborted(self, count: int) -> bool:
        """Whether `count` requests came and were aborted, and no more."""
        submitted = self.requests("generate")
        return len(submitted) == count and self.requests("abort") == submitted


@pytest.fixture
def watch(slow: ServerProcess) -> Watch:
    return Watch(slow)


def test_a_stream_is_hung_up(slow: ServerProcess, watch: Watch) -> None:
    stream = slow.open_stream(ENDLESS)
    next(stream.events)
    assert watch.requests("abort") == set()
    stream.close()
    eventually(partial(watch.all_aborted, 1), WAIT)


def test_a_whole_answer_is_not_waited_for(slow: ServerProcess, watch: Watch) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", slow.port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(completion(ENDLESS)), {"Content-Type": "application/json"})
    eventually(lambda: len(watch.requests("generate")) == 1)  # before that nothing is there to be aborted
    connection.close()
    eventually(partial(watch.all_aborted, 1), WAIT)


def test_all_prompts_and_choices_of_a_request(slow: ServerProcess, watch: Watch) -> None:
    stream = slow.open_stream(ENDLESS, prompt=[[5], [6], [7]], n=2)
    next(stream.events)
    eventually(lambda: len(watch.requests("generate")) == 3)
    stream.close()
    eventually(partial(watch.all_aborted, 3), WAIT)


def test_the_same_request_may_come_again(slow: ServerProcess, watch: Watch) -> None:
    for count in range(1, 21):
        stream = slow.open_stream(ENDLESS)
        next(stream.events)
        stream.close()
        eventually(partial(watch.all_aborted, count), WAIT)
    assert slow.complete(1).status_code == 200


def test_a_client_that_leaves_while_it_sends(slow: ServerProcess) -> None:
    with socket.create_connection(("127.0.0.1", slow.port)) as connection:
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
        )
        connection.sendall(head.encode() + b'{"model": ')
        time.sleep(0.1)
    assert slow.complete(1).status_code == 200
    assert "Traceback" not in slow.stderr
    assert "unexpected" not in slow.stderr


def test_who_has_sent_another_request_behind_the_first(slow: ServerProcess, watch: Watch) -> None:
    """Pipelined: the one that is being answered is not the one that came last."""
    body = json.dumps(completion(ENDLESS, stream=True)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection(("127.0.0.1", slow.port)) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + body + b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        eventually(lambda: len(watch.requests("generate")) == 1)
        assert connection.recv(100)
    eventually(partial(watch.all_aborted, 1), WAIT)


def test_many_at_random_times(slow: ServerProcess, watch: Watch) -> None:
    def hang_up(number: int) -> None:
        body = completion(ENDLESS, n=1 + number % 5)
        with pytest.raises(httpx.TimeoutException), slow.client() as client:
            client.post("/v1/completions", json=body, timeout=httpx.Timeout(5, read=0.01 + number * 0.005))

    def stream_and_hang_up(number: int) -> None:
        stream = slow.open_stream(ENDLESS)
        for _ in range(number % 7):
            next(stream.events)
        stream.close()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda number: (stream_and_hang_up if number % 3 else hang_up)(number), range(60)))
    eventually(lambda: watch.requests("abort") == watch.requests("generate"), WAIT)
    assert len(watch.requests("abort")) >= 40
    assert slow.complete(2).status_code == 200
    assert "unexpected" not in slow.stderr


def test_what_is_aborted_is_counted(slow: ServerProcess, watch: Watch) -> None:
    def counters() -> dict[str, float]:
        with slow.client() as client:
            lines = [line for line in client.get("/metrics").text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    before = counters()
    for _ in range(3):
        stream = slow.open_stream(ENDLESS)
        next(stream.events)
        stream.close()
    eventually(partial(watch.all_aborted, 3), WAIT)
    names = (
        'intarsia:request_success_total{finished_reason="abort",model_name="scripted"}',
        'intarsia:e2e_request_latency_seconds_count{model_name="scripted"}',
        'intarsia:time_to_first_token_seconds_count{model_name="scripted"}',
        'intarsia:http_responses_total{model_name="scripted",status="499"}',
    )

    def counted() -> list[float]:
        after = counters()
        return [after.get(name, 0) - before.get(name, 0) for name in names]

    eventually(lambda: sum(counted()) >= 3 * len(names))  # the runner knows before all of it is counted
    assert counted() == [3] * len(names)
