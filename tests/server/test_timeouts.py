"""Requests that take too long: in the queue, or in all. Each gets an error that says so, and the runner an abort."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor

from openai import InternalServerError, OpenAI

from tests.server.conftest import StartServer
from tests.server.harness import eventually

LONG = 400


def test_an_answer_that_takes_too_long_ends_with_an_error(start_server: StartServer) -> None:
    server = start_server({"step_seconds": 0.02}, request_timeout=4.0).wait_ready()

    def call_again() -> None:
        with OpenAI(base_url=server.base + "/v1", api_key="none", timeout=60) as client:
            client.completions.create(model="scripted", prompt=[5, 6], max_tokens=LONG)

    with ThreadPoolExecutor() as pool:  # all at once: what a test waits for is only the time
        streamed = pool.submit(lambda: server.open_stream(LONG, n=2).rest())
        answered = pool.submit(server.complete, LONG)
        called = pool.submit(call_again)
        *tokens, error, done = streamed.result()
        whole = answered.result()
    assert tokens and done == "[DONE]"
    assert json.loads(error)["error"]["code"] == "timeout"
    assert whole.status_code == 504
    assert whole.json()["error"]["code"] == "timeout"
    assert "longer than the 4 s that" in whole.json()["error"]["message"]
    # The same would take as long again: OpenAI's client obeys this header.
    assert whole.headers["x-should-retry"] == "false"
    assert isinstance(called.exception(), InternalServerError)
    assert len(server.messages("generate")) == 3
    eventually(lambda: len(server.messages("abort")) == 3)
    assert server.complete(2).status_code == 200
    assert len(server.messages("abort")) == 3


def test_a_prompt_that_waits_too_long_gets_503(start_server: StartServer) -> None:
    server = start_server({"step_seconds": 0.005}, queue_timeout=2.0).wait_ready()
    assert server.complete(4).status_code == 200
    server.signal_runner(signal.SIGUSR1)  # Its engine hangs: it takes requests, but none has a slot.
    answer = server.complete(4)
    server.signal_runner(signal.SIGUSR1)
    assert answer.status_code == 503
    assert answer.headers["Retry-After"]
    assert answer.json()["error"]["code"] == "overloaded"
    eventually(lambda: len(server.messages("abort")) == 1)
    # A long answer is no long wait.
    assert server.complete(500).status_code == 200
    with server.client() as client:
        text = client.get("/metrics").text
    assert 'intarsia:errors_total{code="overloaded",model_name="scripted"} 1.0' in text
    assert 'intarsia:request_success_total{finished_reason="error",model_name="scripted"} 1.0' in text
