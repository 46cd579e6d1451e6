"""The probes follow the runner's heartbeat, and answer whatever else goes on; /metrics tells what happened."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import StartServer
from tests.server.harness import ServerProcess, eventually
from tests.server.scripted_runner import REJECTED

STALLED = pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGUSR1], ids=["frozen", "its engine hangs"])


def come_back(server: ServerProcess, number: int) -> None:
    server.signal_runner(signal.SIGCONT if number == signal.SIGSTOP else number)


@STALLED
def test_a_stalled_runner_is_noticed_and_may_come_back(start_server: StartServer, number: int) -> None:
    server = start_server(ready_seconds=0.5).wait_ready()
    server.signal_runner(number)
    eventually(lambda: server.status("/readyz") == 503)
    assert server.status("/livez") == 200  # for a minute
    with server.client() as client:
        assert client.get("/readyz").json() == {"status": "stalled"}
    come_back(server, number)
    eventually(lambda: server.status("/readyz") == 200)
    assert server.complete(1).status_code == 200
    server.signal(signal.SIGTERM)
    assert server.exit_status() == 0


@STALLED
def test_a_runner_that_is_silent_for_long_is_dead_until_it_comes_back(start_server: StartServer, number: int) -> None:
    server = start_server(live_seconds=1.5).wait_ready()
    server.signal_runner(number)
    eventually(lambda: server.status("/livez") == 503)
    refused = server.complete(1)
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    come_back(server, number)
    eventually(lambda: server.status("/livez") == 200)
    eventually(lambda: server.complete(1).status_code == 200)


def test_a_frozen_runner_leaves_nobody_waiting_and_goes_with_the_server(start_server: StartServer) -> None:
    server = start_server(ready_seconds=0.5, live_seconds=1.5).wait_ready()
    server.signal_runner(signal.SIGSTOP)
    answer = server.complete(1)  # Sent before anybody has noticed.
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "overloaded"
    server.signal(signal.SIGTERM)
    assert server.exit_status() == 0
    assert not server.runner_is_alive()


def test_ready_and_live(server: ServerProcess) -> None:
    with server.client() as client:
        for path in ("/health", "/readyz", "/livez"):
            assert client.get(path).json() == {"status": "ok"}
            assert client.head(path).status_code == 200
        assert set(client.get("/version").json()) == {"version"}


def test_probes_answer_under_load(start_server: StartServer) -> None:
    """A probe must not wait for tokens: many are answered before a stream has ended. How soon is a benchmark's
    business."""
    server = start_server({"step_seconds": 0.02, "max_model_len": 1 << 16}).wait_ready()
    with ThreadPoolExecutor(32) as pool, server.client() as client:
        streams = list(pool.map(lambda _: server.open_stream(50_000), range(32)))
        for stream in streams:
            next(stream.events)
        for _ in range(20):
            assert client.get("/livez").status_code == 200
        assert server.messages("end") == []
        for stream in streams:
            next(stream.events)
            stream.close()


def samples(server: ServerProcess) -> dict[str, float]:
    """The scrape: name and labels but the model's, as `name` or `name{value}`."""
    with server.client() as client:
        # What Prometheus 2 sends, which likes OpenMetrics best.
        accept = (
            "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,*/*;q=0.1"
        )
        answer = client.get("/metrics", headers={"Accept": accept})
    assert answer.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name != "model_name"]
            found[sample.name + (f"{{{','.join(labels)}}}" if labels else "")] = sample.value
    return found


def test_every_family_moves(server: ServerProcess) -> None:
    before = samples(server)
    assert server.complete(4, n=2).status_code == 200
    assert server.complete(4, prompt=[[5, 6], [7]]).status_code == 200
    server.open_stream(4).rest()
    with server.client() as client:
        assert client.get("/nowhere").status_code == 404

    def moved() -> bool:
        after = samples(server)
        change = {name: after[name] - before.get(name, 0) for name in after}
        return (
            # Four prompts: n choices are one request.
            change["intarsia:request_success_total{length}"] == 4
            and change["intarsia:e2e_request_latency_seconds_count"] == 4
            and change["intarsia:prompt_tokens_total"] == 3 + 2 + 1 + 3
            and change["intarsia:generation_tokens_total"] == 5 * 4
            and change["intarsia:time_to_first_token_seconds_count"] == 5
            and change["intarsia:inter_token_latency_seconds_count"] == 5 * 3
            and change["intarsia:request_queue_time_seconds_count"] == 4
            and change["intarsia:http_responses_total{404}"] == 1
            and change["intarsia:engine_steps_total{eager}"] > 0
        )

    eventually(moved)
    names = samples(server)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"):
        assert f"intarsia:{name}" in names
    for name in ("prefix_cache_queries_total", "prefix_cache_hits_total"):
        assert f"intarsia:{name}" in names
    assert "process_resident_memory_bytes" in names


def test_labels_are_bounded(server: ServerProcess) -> None:
    """No client may add a time series: not by a path, a method, a model's name or an id."""
    with server.client() as client:
        client.get("/warm-up")
        client.post("/v1/completions", json={"model": "nobody", "prompt": [5]})
        before = set(samples(server))
        for number in range(5):
            client.get(f"/nowhere-{number}", headers={"x-request-id": f"id-{number}"})
            client.request(f"GET{'X' * number}"[:8], "/livez")
            client.post("/v1/completions", json={"model": f"model-{number}", "prompt": [5]})
    new = set(samples(server)) - before
    assert new <= {"intarsia:http_responses_total{400}", "intarsia:http_responses_total{405}"}


@pytest.mark.parametrize("token", REJECTED)
def test_a_rejection_reaches_the_client(server: ServerProcess, token: int) -> None:
    reason = REJECTED[token]
    status = 400 if reason == "invalid" else 429
    counter = f"intarsia:admission_rejections_total{{{reason}}}"
    before = samples(server).get(counter, 0)
    for stream in (False, True):
        answer = server.complete(1, prompt=[token], stream=stream)
        assert answer.status_code == status
        assert answer.json()["error"]["message"] == "The script says no."
        assert ("retry-after" in answer.headers) == (status == 429)
    assert samples(server)[counter] == before + 2
