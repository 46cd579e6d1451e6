"""`make bench-frontend`: what the API side costs, with the engine scripted.

    python -m tests.bench.frontend [--api-workers N] [--streams 256] [--rate 5000] [--seconds 8]

A scripted runner makes one token a step for each of `--streams` streamed completions, in so many steps a second that
all of them together are `--rate` tokens. Prints one JSON line: CPU microseconds (user and system) per event of all API
processes, tokens per event (1 where the reader keeps up; a late one finds tokens merged, which costs less a token), how
the connections are spread over the processes; then, apart from that since probes cost CPU time too, the latency of
/livez beside the streams, and while prompts of 64 MiB of rows arrive (85 MB of base64 in JSON, one after another).
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import multiprocessing
import os
import random
import selectors
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from runner.default_model import default_model_path
from tests.server.harness import ServerProcess
from tests.server.scripted_runner import Script

_WINDOW = 1.0
"""Seconds over which CPU time is taken: the best of several is the least disturbed one."""
_MARK = {"/v1/completions": b'"text":', "/v1/chat/completions": b'"delta":'}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--api-workers", type=int, default=1)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rate", type=float, default=5000.0, help="tokens a second of all streams together")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--chat", action="store_true", help="/v1/chat/completions instead of /v1/completions")
    parser.add_argument("--body", default="{}", help="further fields of each request, as JSON")
    arguments = parser.parse_args()
    path = "/v1/chat/completions" if arguments.chat else "/v1/completions"
    script = Script(str(default_model_path()), step_seconds=arguments.streams / arguments.rate, max_model_len=1 << 17)
    options: dict[str, Any] = {"log_level": "warning"}
    if arguments.api_workers > 1:
        options["api_workers"] = arguments.api_workers
    with tempfile.TemporaryDirectory() as folder, ServerProcess(script, Path(folder), **options) as server:
        server.wait_ready()
        body = {"max_tokens": 100_000, "ignore_eos": True, "stream": True, **json.loads(arguments.body)}
        with Load(server.port, path, body, arguments.streams) as load:
            print(json.dumps(vars(arguments) | measure(server, load, arguments.seconds)), flush=True)


def measure(server: ServerProcess, load: Load, seconds: float) -> dict[str, Any]:
    pids = api_processes(server)
    windows = [window(pids, load) for _ in range(max(1, round(seconds / _WINDOW)))]
    rate, per_event = tokens(server, load)
    latencies = probe_latencies(server.port, 3.0)
    with upload(server.port, rows_body(64 << 20)):
        loaded = probe_latencies(server.port, 3.0)
    costs = [cpu / events * 1e6 for cpu, events in windows]
    return {
        "us_per_event": {"median": round(statistics.median(costs), 1), "best": round(min(costs), 1)},
        "tokens_per_second": round(rate),
        "tokens_per_event": round(per_event, 3),
        "streams_by_process": [connections(pid, server.port) for pid in pids],
        "livez_ms": percentiles(latencies),
        "livez_during_upload_ms": percentiles(loaded),
    }


def window(pids: list[int], load: Load) -> tuple[float, int]:
    """CPU seconds and events of one window, in which nothing else is asked of the server."""
    cpu, events = sum(map(cpu_seconds, pids)), load.events.value
    time.sleep(_WINDOW)
    return sum(map(cpu_seconds, pids)) - cpu, load.events.value - events


def tokens(server: ServerProcess, load: Load) -> tuple[float, float]:
    """A second, and an event."""
    began, made, events = time.perf_counter(), generated(server), load.events.value
    time.sleep(2 * _WINDOW)
    took, made, events = time.perf_counter() - began, generated(server) - made, load.events.value - events
    return made / took, made / events


def percentiles(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100)
    return {"p50": round(cuts[49] * 1e3, 1), "p99": round(cuts[98] * 1e3, 1)}


# --- the server -------------------------------------------------------------------------------------------------------


def cpu_seconds(pid: int) -> float:
    """User and system, of all threads."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def api_processes(server: ServerProcess) -> list[int]:
    main = server.process.pid
    children = map(int, Path(f"/proc/{main}/task/{main}/children").read_text().split())
    return [main, *(pid for pid in children if pid != server.runner_pid)]


def connections(pid: int, port: int) -> int:
    """Established connections to the server's port that a process holds."""
    mine = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        try:
            mine.add(os.readlink(each))
        except FileNotFoundError:
            continue
    lines = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    established = [line for line in lines if line[3] == "01" and int(line[1].rpartition(":")[2], 16) == port]
    return sum(f"socket:[{line[9]}]" in mine for line in established)


def generated(server: ServerProcess) -> float:
    with server.client() as client:
        lines = client.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith("intarsia:generation_tokens_total")).split()[-1])


def probe_latencies(port: int, seconds: float) -> list[float]:
    latencies, end = [], time.perf_counter() + seconds
    connection = http.client.HTTPConnection("127.0.0.1", port)
    while time.perf_counter() < end:
        began = time.perf_counter()
        connection.request("GET", "/livez")
        connection.getresponse().read()
        latencies.append(time.perf_counter() - began)
        time.sleep(0.01)
    connection.close()
    return latencies


@contextmanager
def upload(port: int, body: bytes) -> Iterator[None]:
    """Meanwhile `body` arrives, again and again."""
    over = threading.Event()

    def send() -> None:
        while not over.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            assert response.status == 200, response.read()
            response.read()
            connection.close()

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def rows_body(size: int) -> bytes:
    """A request whose prompt is `size` bytes of the default model's rows."""
    hidden = json.loads((default_model_path() / "config.json").read_text())["hidden_size"]
    payload = save({"rows": np.ones((size // 4 // hidden, hidden), np.float32)})
    return json.dumps({"prompt_embeds": base64.b64encode(payload).decode(), "max_tokens": 1}).encode()


# --- the clients ------------------------------------------------------------------------------------------------------


class Load:
    """`streams` streamed requests, read by a process of its own. Entered once each has had its first event."""

    def __init__(self, port: int, path: str, body: dict[str, Any], streams: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.events: Synchronized[int] = context.Value("q", 0)
        self._begun = context.Event()
        arguments = (port, path, body, streams, self.events, self._begun)
        self._process = context.Process(target=read_streams, args=arguments)

    def __enter__(self) -> Load:
        self._process.start()
        assert self._begun.wait(30), "not every stream has begun"
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.join()


def read_streams(
    port: int, path: str, body: dict[str, Any], streams: int, events: Synchronized[int], begun: Any
) -> None:
    draw, mark = random.Random(0), _MARK[path]
    waiting = selectors.DefaultSelector()
    silent = set()
    for _ in range(streams):
        ids = [draw.randrange(300, 20_000) for _ in range(512)]
        prompt = {"messages": [{"role": "user", "content": json.dumps(ids)}]} if "chat" in path else {"prompt": ids}
        data = json.dumps(body | prompt).encode()
        connection = socket.create_connection(("127.0.0.1", port))
        head = (
            f"POST {path} HTTP/1.1\r\nHost: b\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        connection.sendall(head.encode() + data)
        silent.add(connection.fileno())
        waiting.register(connection, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select():
            connection = key.fileobj  # type: ignore[assignment]
            received = connection.recv(1 << 16)
            assert received and not received.startswith(b"HTTP/1.1 4"), received
            count = received.count(mark)
            events.value += count
            if count and silent:
                silent.discard(connection.fileno())
                if not silent:
                    begun.set()


if __name__ == "__main__":
    main()
