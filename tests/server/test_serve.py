"""The life of a server: loading, drain, and every way to die. A real server, a real child process, real signals."""

from __future__ import annotations

import json
import math
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import zmq

from runner.messages import Rejected, encode
from server.listener import bind
from tests.server.conftest import StartServer
from tests.server.harness import ServerProcess, eventually, free_port, is_alive
from tests.server.scripted_runner import NUDGE

FEW = 20
"""Tokens. Whatever is to be seen running is held (`ServerProcess.held`)."""


def assert_nothing_is_left(server: ServerProcess) -> None:
    assert not is_alive(server.runner_pid)
    assert server.leftovers() == []


def error_of(event: str) -> str:
    return str(json.loads(event)["error"]["code"])


def test_probes_answer_while_the_model_loads(start_server: StartServer) -> None:
    server = start_server({"load_seconds": 3600})
    eventually(lambda: server.status("/livez") == 200)
    assert server.status("/readyz") == 503
    assert server.status("/health") == 503
    assert server.status("/metrics") == 200
    refused = server.complete(1)
    assert refused.status_code == 503
    assert refused.json()["error"]["type"] == "server_error"
    assert int(refused.headers["retry-after"]) > 0
    assert server.status("/v1/models") == 503
    server.signal_runner(NUDGE)
    server.wait_ready()
    assert server.complete(1).status_code == 200
    assert server.status("/health") == 200


def test_sigterm_finishes_what_runs_and_refuses_the_rest(start_server: StartServer) -> None:
    server = start_server().wait_ready()
    with ThreadPoolExecutor() as pool, server.client() as idle_connection, ExitStack() as held:
        idle_connection.get("/readyz")
        step = held.enter_context(server.held())
        whole = pool.submit(server.complete, FEW)
        stream = server.open_stream(FEW)
        eventually(lambda: len(server.messages("generate")) == 2)
        step()
        first = next(stream.events)
        server.signal(signal.SIGTERM)
        # The listener stays open: who comes now is told, on new connections and on old ones.
        eventually(lambda: server.status("/readyz") == 503)
        assert server.status("/livez") == 200
        refused = server.complete(1)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert idle_connection.get("/readyz").status_code == 503
        assert server.process.poll() is None
        held.close()
        # The two that were running end as if nothing had happened.
        events = [first, *stream.rest()]
        assert events[-1] == "[DONE]"
        assert not any("error" in event for event in events)
        assert whole.result().status_code == 200
        assert whole.result().json()["usage"]["completion_tokens"] == FEW
    assert server.exit_status() == 0
    assert server.messages("abort") == []
    assert_nothing_is_left(server)


def test_says_that_it_is_ready_and_goes_at_once_when_it_has_nothing_to_do(start_server: StartServer) -> None:
    server = start_server().wait_ready()
    assert len(server.leftovers()) == 1
    assert os.getsid(server.runner_pid) == server.runner_pid  # Ctrl-C in a terminal reaches the server alone.
    assert server.process.stdout is not None
    line = server.process.stdout.readline().decode()
    assert "ready" in line
    assert f"curl http://127.0.0.1:{server.port}/v1/completions" in line
    server.signal(signal.SIGINT)
    assert server.exit_status() == 0
    assert server.process.stdout.read() == b""  # One line, and no more.
    assert_nothing_is_left(server)


def test_sigterm_while_loading(start_server: StartServer) -> None:
    server = start_server({"load_seconds": 60.0})
    eventually(lambda: server.status("/livez") == 200)
    assert server.runner_pid
    server.signal(signal.SIGTERM)
    assert server.exit_status() == 0
    assert_nothing_is_left(server)


def test_what_outlasts_the_shutdown_timeout_gets_an_error(start_server: StartServer) -> None:
    server = start_server(shutdown_timeout=0.5).wait_ready()
    with ThreadPoolExecutor() as pool, server.held() as step:
        whole = pool.submit(server.complete, FEW)
        stream = server.open_stream(FEW)
        eventually(lambda: len(server.messages("generate")) == 2)
        step()
        next(stream.events)
        server.signal(signal.SIGTERM)
        events = stream.rest()
        assert error_of(events[-2]) == "engine_failed"
        assert events[-1] == "[DONE]"
        assert whole.result().status_code == 503
    assert server.exit_status() == 0
    assert_nothing_is_left(server)


def test_a_second_signal_exits_at_once(start_server: StartServer) -> None:
    server = start_server({"linger": True}).wait_ready()
    with server.held() as step:
        stream = server.open_stream(FEW)
        step()
        next(stream.events)
        server.signal(signal.SIGTERM)
        eventually(lambda: server.status("/readyz") == 503)
        assert server.process.poll() is None
        server.signal(signal.SIGTERM)
        assert server.exit_status() != 0
    assert server.stderr.splitlines()[-1].endswith("a second signal: leaving without waiting for what is still running")
    stream.close()
    eventually(lambda: not server.runner_is_alive())
    assert_nothing_is_left(server)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR2], ids=["killed", "reports a failure"])
def test_the_runner_dies(start_server: StartServer, number: int) -> None:
    server = start_server().wait_ready()
    with ThreadPoolExecutor() as pool, server.held() as step:
        whole = pool.submit(server.complete, FEW)
        stream = server.open_stream(FEW)
        eventually(lambda: len(server.messages("generate")) == 2)
        step()
        next(stream.events)
        server.signal_runner(number)
        events = stream.rest()
        assert error_of(events[-2]) == "engine_failed"
        assert events[-1] == "[DONE]"
        assert whole.result().status_code == 503
        assert whole.result().json()["error"]["code"] == "engine_failed"
    assert server.exit_status() == 1
    assert server.status("/readyz") in (0, 503)
    assert_nothing_is_left(server)


def send_to_worker(server: ServerProcess, number: int, data: bytes) -> None:
    """As if it came from the runner."""
    (folder,) = server.leftovers()
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(f"ipc://{folder}/worker{number}")
        socket.send(data)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (b"\xc1", "the runner sent a message that makes no sense (DecodeError)"),
        (encode(Rejected(1, "queue_full", "secret", math.inf)), "unexpected builtins.OverflowError"),
    ],
    ids=["nonsense", "a fault of ours"],
)
def test_what_cannot_be_taken_in_ends_the_server(start_server: StartServer, message: bytes, said: str) -> None:
    """Part of a step may be lost with it: nobody is to wait for that."""
    server = start_server().wait_ready()
    with server.held() as step:
        stream = server.open_stream(FEW)
        step()
        next(stream.events)
        send_to_worker(server, 0, message)
        events = stream.rest()
    assert error_of(events[-2]) == "engine_failed"
    assert server.exit_status() == 1
    assert said in server.stderr
    assert "secret" not in server.stderr
    assert_nothing_is_left(server)


def test_the_runner_cannot_load_the_model(start_server: StartServer) -> None:
    server = start_server({"fail_loading": "raise --kv-cache-memory-bytes"})
    assert server.exit_status() == 3
    assert "raise --kv-cache-memory-bytes" in server.stderr
    assert "Traceback" not in server.stderr
    assert_nothing_is_left(server)


def test_a_runner_that_does_not_stop_is_killed(start_server: StartServer) -> None:
    server = start_server({"linger": True}).wait_ready()
    server.signal(signal.SIGTERM)
    assert server.exit_status() == 0
    assert_nothing_is_left(server)


def test_the_runner_goes_with_a_server_that_is_killed(start_server: StartServer) -> None:
    server = start_server().wait_ready()
    runner = server.runner_pid
    server.signal(signal.SIGKILL)
    server.exit_status()
    eventually(lambda: not is_alive(runner))
    assert len(server.leftovers()) == 1  # Nobody was left to remove it: the next server does.


def test_two_servers_on_one_port(start_server: StartServer) -> None:
    first = start_server({"load_seconds": 60.0})
    eventually(lambda: first.status("/livez") == 200)
    second = start_server(port=first.port)
    assert second.exit_status() == 1
    assert f"cannot listen on 127.0.0.1:{first.port}: Address already in use" in second.stderr
    assert "Traceback" not in second.stderr
    assert second.messages("start") == []  # No runner was started for nothing.
    assert first.status("/livez") == 200
    third = start_server(probe_port=first.port)
    assert third.exit_status() == 1
    assert f"cannot listen on 127.0.0.1:{first.port}: Address already in use" in third.stderr


def test_probes_on_a_port_of_their_own(start_server: StartServer) -> None:
    port = free_port()
    server = start_server({"load_seconds": 3600}, probe_port=port)

    def status(path: str) -> int:
        try:
            return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=30).status_code
        except httpx.TransportError:
            return 0

    eventually(lambda: status("/livez") == 200)
    assert status("/readyz") == 503
    server.signal_runner(NUDGE)
    eventually(lambda: status("/readyz") == 200)
    with server.held():
        stream = server.open_stream(FEW)
        server.signal(signal.SIGTERM)
        eventually(lambda: status("/readyz") == 503)
        assert status("/livez") == 200
    assert stream.rest()[-1] == "[DONE]"
    assert server.exit_status() == 0
    assert_nothing_is_left(server)


def test_bound_sockets_collide_before_anybody_accepts() -> None:
    port = free_port()
    with bind("127.0.0.1", port), pytest.raises(OSError, match="in use"):
        bind("127.0.0.1", port)


def test_a_folder_without_a_tokenizer_is_a_configuration_error(start_server: StartServer, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"model_type": "llama", "hidden_size": 8, "vocab_size": 32}
    (folder / "config.json").write_text(json.dumps(config))
    server = start_server({"model": str(folder)})
    assert server.exit_status() == 3
    assert "intarsia: the model's tokenizer" in server.stderr
    assert "Traceback" not in server.stderr
    assert_nothing_is_left(server)
