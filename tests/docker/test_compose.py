"""compose.yaml: a server, a Prometheus that scrapes it, and a Grafana with the dashboard. Prometheus evaluates every
expression of the dashboard and of the alerts on what the server measured of real requests."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import yaml

from tests.docker.conftest import note
from tests.docker.dashboard import alerts, expressions
from tests.docker.engine import ROOT, Compose, Engine
from tests.integration.real_server import as_safetensors
from tests.server.harness import eventually, free_port

pytestmark = [pytest.mark.docker, pytest.mark.timeout(3600)]

COMPOSE = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
STAND_IN = "localhost/intarsia-test:prometheus"
HIDDEN = 576
"""Of the default model."""


@dataclass(frozen=True)
class Stack:
    server: str
    prometheus: str
    grafana: str
    """"" where its image cannot be had."""
    call: Any
    done: threading.Event = field(default_factory=threading.Event)
    clients: list[threading.Thread] = field(default_factory=list)

    def be_quiet(self) -> None:
        """No more requests."""
        self.done.set()
        for thread in self.clients:
            thread.join()


def default_image(service: str) -> str:
    """`${NAME:-default}`."""
    text = str(COMPOSE["services"][service]["image"])
    return text.partition(":-")[2].removesuffix("}")


@pytest.fixture(scope="module")
def prometheus_image(engine: Engine) -> str:
    """The compose file's, or what stands in for it."""
    image = default_image("prometheus")
    if not engine.can_pull(image):
        engine.build(STAND_IN, "tests/docker/prometheus.Dockerfile", context=ROOT / "tests" / "docker")
        note(f"{image} cannot be pulled: Debian's package stood in for it")
        return STAND_IN
    return image


@pytest.fixture(scope="module")
def stack(engine: Engine, tools: Path, image: str, prometheus_image: str) -> Iterator[Stack]:
    ports = {name: str(free_port()) for name in ("INTARSIA_PORT", "PROMETHEUS_PORT", "GRAFANA_PORT")}
    variables = {**ports, "INTARSIA_IMAGE": image, "MODEL_ARGS": "--max-num-seqs 2 --max-queue 1"}
    variables["PROMETHEUS_IMAGE"] = prometheus_image
    services = ["intarsia", "prometheus"]
    if engine.can_pull(default_image("grafana")):
        services.append("grafana")
    else:
        note(f"{default_image('grafana')} cannot be pulled: Grafana was not started")
    try:
        compose = Compose(engine, tools, f"intarsia-test-{os.getpid()}", variables)
    except FileNotFoundError as error:
        pytest.skip(f"there is no compose: {error}")
    try:
        compose.call("up", "--detach", "--no-build", *services)
        base = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
        grafana = base["GRAFANA_PORT"] if "grafana" in services else ""
        yield Stack(base["INTARSIA_PORT"], base["PROMETHEUS_PORT"], grafana, compose.call)
    finally:
        print(compose.call("logs", check=False)[-4000:])
        compose.call("down", "--volumes", check=False)


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, timeout=5).status_code == 200
    return False


def query(stack: Stack, expression: str) -> list[dict[str, Any]]:
    """Fails where Prometheus does not understand it."""
    answer = httpx.get(f"{stack.prometheus}/api/v1/query", params={"query": expression}, timeout=30).json()
    assert answer["status"] == "success", (expression, answer)
    result = answer["data"]["result"]
    assert isinstance(result, list)
    return result


@pytest.fixture(scope="module")
def scraped(stack: Stack) -> Iterator[Stack]:
    """While clients do all that the server counts: answers, streams, embeddings, grammars, errors, too much at once."""
    eventually(lambda: answers(f"{stack.server}/readyz"), 240)
    eventually(lambda: answers(f"{stack.prometheus}/-/ready"), 60)
    eventually(lambda: query(stack, 'up{job="intarsia"} == 1'), 60)
    stack.clients.append(threading.Thread(target=_traffic, args=(stack.server, stack.done)))
    stack.clients[0].start()
    try:
        # Rates need two scrapes of the same series, and the range is half a minute.
        for name in (
            "errors_total",
            "admission_rejections_total",
            "embedding_rows_total",
            "grammar_compile_seconds_sum",
        ):
            eventually(lambda name=name: query(stack, f"rate(intarsia:{name}[30s])"), 120)  # type: ignore[misc]
        time.sleep(6)
        yield stack
    finally:
        stack.be_quiet()


def _traffic(server: str, done: threading.Event) -> None:
    rows = torch.from_numpy(np.random.default_rng(0).standard_normal((4, HIDDEN), dtype=np.float32))
    bodies: list[dict[str, Any]] = [
        {"prompt": "Once upon a time", "max_tokens": 16, "n": 2},
        {"prompt": "Once upon a time", "max_tokens": 16, "stream": True},
        {"prompt": "Yes or no? ", "max_tokens": 4, "structured_outputs": {"choice": ["yes", "no"]}},
        {"prompt_embeds": as_safetensors(rows), "max_tokens": 4},
        {"prompt": "x", "max_tokens": -1},
    ]
    with httpx.Client(base_url=server, timeout=120) as client, concurrent.futures.ThreadPoolExecutor(8) as pool:
        while not done.is_set():
            for body in bodies:
                client.post("/v1/completions", json=body)
            crowd = [pool.submit(client.post, "/v1/completions", json=bodies[0]) for _ in range(8)]
            concurrent.futures.wait(crowd)
            done.wait(0.5)


def test_the_files_say_what_they_should() -> None:
    for name, service in COMPOSE["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        assert "healthcheck" in service or name.startswith("intarsia"), "an image of ours has its own"
        image = str(service["image"])
        assert not image.endswith(("latest}", "latest")), name
        if name.startswith("intarsia"):
            assert service["stop_grace_period"] == "45s"


def test_alerts_fire_when_they_should(engine: Engine, prometheus_image: str) -> None:
    files, tests = ROOT / "docker" / "helm" / "intarsia" / "files", Path(__file__).with_name("alert_tests.yml")
    mounts = ("--volume", f"{files}:/files:ro", "--volume", f"{tests}:/alert_tests.yml:ro")
    command = ("--security-opt", "label=disable", "--entrypoint", "promtool", prometheus_image, "test", "rules")
    engine.call("run", "--rm", *mounts, *command, "/alert_tests.yml")


def test_arguments_reach_the_server(stack: Stack) -> None:
    eventually(lambda: answers(f"{stack.server}/readyz"), 240)
    said = stack.call("exec", "intarsia", "sh", "-c", "tr '\\0' '|' < /proc/1/cmdline; intarsia healthcheck")
    assert "|serve|--host|0.0.0.0|--port|8000|--max-num-seqs|2|--max-queue|1|" in said, "and the shell has gone"
    assert "200" in said


def test_services_run_as_strictly_as_they_say(stack: Stack) -> None:
    for service in ("intarsia", "prometheus"):
        said = stack.call("exec", service, "sh", "-c", "touch /x 2>&1; grep -E 'CapEff|NoNewPrivs' /proc/1/status")
        assert "Read-only file system" in said, said
        assert "0000000000000000" in said, said
        assert "NoNewPrivs:\t1" in said, said


def test_prometheus_understands_the_dashboard_and_finds_all_of_it(scraped: Stack) -> None:
    empty = [(title, text) for title, text in expressions() if not query(scraped, text)]
    assert empty == []


def test_prometheus_understands_the_alerts(scraped: Stack) -> None:
    groups = httpx.get(f"{scraped.prometheus}/api/v1/rules", timeout=30).json()["data"]["groups"]
    found = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert found.keys() == {rule["alert"] for rule in alerts()}
    eventually(lambda: all(rule["health"] != "unknown" for rule in _rules(scraped)), 60)
    assert [rule["lastError"] for rule in _rules(scraped) if rule["health"] != "ok"] == []


def _rules(stack: Stack) -> list[dict[str, Any]]:
    groups = httpx.get(f"{stack.prometheus}/api/v1/rules", timeout=30).json()["data"]["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_grafana_has_the_dashboard(stack: Stack) -> None:
    if not stack.grafana:
        pytest.skip(f"{default_image('grafana')} cannot be pulled here")
    eventually(lambda: answers(f"{stack.grafana}/api/health"), 120)
    found = httpx.get(f"{stack.grafana}/api/dashboards/uid/intarsia", timeout=30)
    assert found.status_code == 200, "and nobody had to log in"
    assert found.json()["dashboard"]["title"] == "Intarsia"
    source = httpx.get(f"{stack.grafana}/api/datasources/uid/prometheus/health", timeout=30)
    assert source.status_code == 200, source.text


def test_the_server_drains_with_the_stack(stack: Stack) -> None:
    """Last: it stops the server."""
    stack.be_quiet()
    eventually(lambda: answers(f"{stack.server}/readyz"), 240)
    body = {"prompt": "Once upon a time", "stream": True, "max_tokens": 60, "ignore_eos": True}
    with httpx.stream("POST", f"{stack.server}/v1/completions", json=body, timeout=120) as stream:
        lines = (line for line in stream.iter_lines() if line)
        next(lines)
        stopping = threading.Thread(target=stack.call, args=("stop", "intarsia"))
        stopping.start()
        *_, last = lines
    stopping.join()
    assert last == "data: [DONE]"
