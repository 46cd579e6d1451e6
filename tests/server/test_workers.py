"""Several API processes behind one port: connections, metrics, drain, and every way to die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from textwrap import dedent

import psutil
import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families

from runner.messages import DIGEST_BYTES
from tests.server.conftest import StartServer
from tests.server.harness import ROOT, ServerProcess, Stream, eventually, is_alive

FEW = 20
"""Tokens. Whatever is to be seen running is held (`ServerProcess.held`)."""


def children(server: ServerProcess) -> list[int]:
    """The API processes beside the first."""
    main = server.process.pid
    pids = map(int, Path(f"/proc/{main}/task/{main}/children").read_text().split())
    return [pid for pid in pids if pid != server.runner_pid]


def workers_of(server: ServerProcess) -> Counter[int]:
    """How many requests came to the runner through each worker."""
    return Counter(event["worker"] for event in server.messages("generate"))


def open_streams(server: ServerProcess, count: int, step: Callable[..., None]) -> list[Stream]:
    """Of a server that is held, one token of each read."""
    streams = [server.open_stream(FEW) for _ in range(count)]
    step()
    for stream in streams:
        next(stream.events)
    return streams


def scrape(server: ServerProcess) -> dict[str, float]:
    """Over a new connection, so that it comes to the next worker. The runner's gauges are left out: they move."""
    with server.client() as client:
        text = client.get("/metrics").text
    return {
        sample.name + "".join(value for key, value in sample.labels.items() if key != "model_name"): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("intarsia:") and "steps" not in sample.name
    }


def assert_over(server: ServerProcess, pids: list[int]) -> None:
    eventually(lambda: not any(map(is_alive, [*pids, server.runner_pid])))
    assert server.leftovers() == []


def test_connections_are_dealt_evenly_and_every_worker_tells_the_same(start_server: StartServer) -> None:
    server = start_server(api_workers=3).wait_ready()
    assert len(children(server)) == 2
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: server.open_stream(5).rest(), range(24)))
    assert all(answer[-1] == "[DONE]" for answer in answers)
    counts = workers_of(server)
    # Probes are connections too, and shift the turns: but no worker gets much more than another.
    assert len(counts) == 3
    assert max(counts.values()) - min(counts.values()) <= 2
    assert {server.status(path) for path in ("/livez", "/readyz", "/v1/models") for _ in range(3)} == {200}
    eventually(lambda: scrape(server)["intarsia:request_success_totallength"] == 24)
    # Each hears of the engine for itself.
    eventually(lambda: len({tuple(scrape(server).items()) for _ in range(3)}) == 1)
    first = scrape(server)
    assert first["intarsia:generation_tokens_total"] == 24 * 5
    assert first["intarsia:inter_token_latency_seconds_count"] == 24 * 4
    assert first["intarsia:http_responses_total200"] >= 24
    models = []
    for _ in range(3):
        with server.client() as client:
            models.append(client.get("/v1/models").json())
    assert models[0] == models[1] == models[2]


def test_the_load_is_that_of_all_workers(start_server: StartServer) -> None:
    server = start_server(api_workers=2).wait_ready()
    with ExitStack() as stack:
        clients = [stack.enter_context(server.client()) for _ in range(2)]
        for client in clients:
            client.get("/readyz")  # each has a connection to another worker
        streams = open_streams(server, 3, stack.enter_context(server.held()))
        assert [client.get("/load").json() for client in clients] == [{"server_load": 3}] * 2
        for stream in streams:
            stream.close()
        eventually(lambda: [client.get("/load").json()["server_load"] for client in clients] == [0, 0])


def test_a_drain_waits_for_every_worker(start_server: StartServer) -> None:
    server = start_server(api_workers=2).wait_ready()
    pids = children(server)
    with ExitStack() as stack, ExitStack() as held:
        idle = [stack.enter_context(server.client()) for _ in range(2)]
        for client in idle:
            client.get("/readyz")
        streams = open_streams(server, 2, held.enter_context(server.held()))
        assert len(workers_of(server)) == 2
        for pid in pids:
            os.kill(pid, signal.SIGTERM)  # As systemd does, which signals them all: the first one's business.
        server.signal(signal.SIGTERM)
        eventually(lambda: [server.status("/readyz") for _ in range(2)] == [503, 503])
        assert [client.get("/readyz").status_code for client in idle] == [503, 503]
        assert [server.complete(1).status_code for _ in range(2)] == [503, 503]
        held.close()
        for stream in streams:
            events = stream.rest()
            assert events[-1] == "[DONE]"
            assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
    assert server.exit_status() == 0
    assert server.messages("abort") == []
    assert_over(server, pids)


def test_what_outlasts_the_shutdown_timeout_gets_an_error_from_each_worker(start_server: StartServer) -> None:
    server = start_server(api_workers=2, shutdown_timeout=0.3).wait_ready()
    with server.held() as step:
        pids, streams = children(server), open_streams(server, 2, step)
        server.signal(signal.SIGTERM)
        for stream in streams:
            *_, error, done = stream.rest()
            assert json.loads(error)["error"]["code"] == "engine_failed"
            assert done == "[DONE]"
    assert server.exit_status() == 0
    assert_over(server, pids)


def test_a_second_signal_ends_every_worker_at_once(start_server: StartServer) -> None:
    server = start_server({"linger": True}, api_workers=2).wait_ready()
    with server.held() as step:
        pids, streams = children(server), open_streams(server, 2, step)
        server.signal(signal.SIGTERM)
        eventually(lambda: server.status("/readyz") == 503)
        server.signal(signal.SIGTERM)
        assert server.exit_status() != 0
    for stream in streams:
        stream.close()
    assert_over(server, pids)


def test_a_worker_that_dies_is_replaced_and_the_runner_s_death_is_told_by_all(start_server: StartServer) -> None:
    server = start_server(api_workers=2).wait_ready()
    (pid,) = children(server)
    with server.held() as step:
        streams = open_streams(server, 2, step)
        before = scrape(server)["intarsia:generation_tokens_total"]
        os.kill(pid, signal.SIGKILL)
        gone = eventually(lambda: server.messages("gone"))
        assert [(event["worker"], event["running"]) for event in gone] == [(1, 1)]
    endings = sorted(stream.rest()[-1:] == ["[DONE]"] for stream in streams)
    assert endings == [False, True]  # One is cut off; the first worker's is none the worse.
    (other,) = eventually(lambda: children(server))
    assert other != pid
    assert f"API worker 1 has died (signal {signal.SIGKILL})" in server.stderr
    assert server.status("/readyz") == 200

    def takes_requests() -> bool:
        assert server.complete(1).status_code == 200
        return 2 in workers_of(server)

    eventually(takes_requests)
    assert scrape(server)["intarsia:generation_tokens_total"] > before  # What the dead one had counted still counts.
    with server.held() as step:
        pids, streams = children(server), open_streams(server, 2, step)
        said = server.stderr.count("API worker")
        server.signal_runner(signal.SIGKILL)
        for stream in streams:
            *_, error, done = stream.rest()
            assert json.loads(error)["error"]["code"] == "engine_failed"
            assert done == "[DONE]"
    assert server.exit_status() == 1
    assert "the runner has stopped" in server.stderr
    assert server.stderr.count("API worker") == said
    assert_over(server, pids)


def test_a_worker_that_has_lost_the_runner_is_replaced(start_server: StartServer) -> None:
    """It alone: the others, and the runner, are none the worse."""
    server = start_server(api_workers=2).wait_ready()
    (pid,) = children(server)
    (folder,) = server.leftovers()
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(f"ipc://{folder}/worker1")
        socket.send(b"no message")
    eventually(lambda: not is_alive(pid))
    eventually(lambda: "API worker 1 has died (exit status 1)" in server.stderr)
    (other,) = eventually(lambda: children(server))
    assert other != pid
    assert server.complete(1).status_code == 200


def test_a_worker_that_cannot_start_ends_the_server(start_server: StartServer) -> None:
    server = start_server({"load_seconds": 60}, api_workers=2)
    eventually(lambda: server.status("/livez") == 200)
    (pid,) = eventually(lambda: children(server) if server.runner_pid else [])
    os.kill(pid, signal.SIGKILL)
    assert server.exit_status() == 1
    assert "API worker 1 cannot be kept running" in server.stderr
    assert_over(server, [pid])


def test_workers_go_with_a_server_that_is_killed(start_server: StartServer) -> None:
    """And what these have started: their grammar processes."""
    server = start_server(api_workers=2).wait_ready()
    while set(workers_of(server)) != {0, 1}:
        assert server.complete(1, guided_regex="a+").status_code == 200
    pids = [each.pid for each in psutil.Process(server.process.pid).children(recursive=True)]
    assert len(pids) == 4  # the runner, the other worker, and a grammar process of each worker
    server.signal(signal.SIGKILL)
    server.exit_status()
    eventually(lambda: not any(map(is_alive, pids)))


def test_no_thread_keeps_the_event_loop_waiting_for_long() -> None:
    """Python's own 5 ms would be what a stream waits each time that another thread is busy with Python."""
    assert float(configured("ServerConfig()", "import sys; print(sys.getswitchinterval())")) <= 0.001


@pytest.mark.parametrize("caching", [True, False])
def test_rows_are_hashed_for_the_prefix_cache_only(caching: bool) -> None:
    found = configured(
        f"ServerConfig(enable_prefix_caching={caching})",
        """
        from server.row_values import row_digests
        print(row_digests(memoryview(b"ab" * 8), 8))
        """,
    )
    assert (found == str(bytes(2 * DIGEST_BYTES))) is not caching


@pytest.mark.parametrize(("processes", "count"), [(1, 2), (5, 2), (6, 1), (8, 1), (40, 1)])
def test_processes_share_the_cores_when_they_make_rows(processes: int, count: int) -> None:
    """Sixteen, of a machine that has more."""
    found = configured(
        f"ServerConfig(api_workers={processes})",
        """
        import os
        from server.row_pieces import threads
        os.cpu_count, os.sched_getaffinity = lambda: 64, lambda _: range(16)
        print(threads()._max_workers)
        """,
    )
    assert int(found) == count


def configured(config: str, then: str) -> str:
    """What is printed by a process that has been configured."""
    program = "from server.config import ServerConfig\nfrom server.worker import configure_process\n"
    program += f"configure_process({config})\n{dedent(then)}"
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return ran.stdout.strip()
