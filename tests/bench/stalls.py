"""`python -m tests.bench.stalls`: for how long the event loop of an API process stands still while large bodies arrive.

A real server with a scripted runner behind it; another process sends 64 MiB of rows again and again, in one form after
the other: base64 in JSON (85 MB), a multipart body, a raw upload to the store. A timer in the server's event loop says
how late it is called. Prints one JSON line a form: lateness in ms without and with bodies, how many were answered, and
CPU milliseconds of the API process for each. On a machine with other work the first shows what that work does;
--realtime (for root) lets the server's threads go before it.

    python -m tests.bench.stalls [--rows 8192] [--hidden 4096] [--seconds 5] [--forms base64 multipart upload text]
                                 [--realtime]
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.bench.bodies import FORM, RAW, UPLOAD, completion, multipart, part, tensor_file
from tests.bench.frontend import cpu_seconds
from tests.bench.late_loop import CAPACITY
from tests.models import build_tokenizer
from tests.server.harness import ServerProcess
from tests.server.scripted_runner import Script

FORMS = ("base64", "multipart", "upload", "text")
"""The last: as many bytes as base64 has, as a long string that is none."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS[:3])
    parser.add_argument("--realtime", action="store_true", help="the server's threads go before everything else")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = fake_model(Path(folder) / "model", arguments.hidden)
        script = Script(str(model), max_model_len=arguments.rows + 16, dtype="bfloat16")
        server = ServerProcess(script, Path(folder), log_level="warning")
        server.launcher = ["tests.bench.late_loop"]
        found = np.memmap(Path(folder) / "lateness", np.float64, "w+", shape=(CAPACITY,))
        server.environment = {"LATENESS": str(Path(folder) / "lateness")}
        with server:
            server.wait_ready()
            for form in arguments.forms:
                print(json.dumps({"form": form, **measure(server, found, form, arguments)}), flush=True)


def fake_model(path: Path, hidden: int) -> Path:
    """What the API side reads of one."""
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(path)
    config = {"model_type": "llama", "hidden_size": hidden, "vocab_size": len(tokenizer)}
    (path / "config.json").write_text(json.dumps(config))
    return path


def measure(
    server: ServerProcess, found: npt.NDArray[np.float64], form: str, arguments: argparse.Namespace
) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    answered, go_on = context.Value("i", 0), context.Event()
    client = context.Process(target=send_bodies, args=(server.port, form, arguments, answered, go_on))
    client.start()
    while not answered.value:  # the first one warms up
        assert client.exitcode is None, "the client has failed"
        time.sleep(0.01)
    if arguments.realtime:
        go_first(server.process.pid)
    time.sleep(1)
    quiet = lateness(found, arguments.seconds)
    before, cpu = answered.value, cpu_seconds(server.process.pid)
    go_on.set()
    busy = lateness(found, arguments.seconds)
    bodies = answered.value - before
    cpu = cpu_seconds(server.process.pid) - cpu
    client.terminate()
    client.join()
    return {"quiet_ms": told(quiet), "busy_ms": told(busy), "bodies": bodies, "cpu_ms": round(cpu / bodies * 1e3, 1)}


def go_first(pid: int) -> None:
    """What a process does to itself is left to see; its event loop's thread goes before its others."""
    for thread in map(int, os.listdir(f"/proc/{pid}/task")):
        os.sched_setscheduler(thread, os.SCHED_FIFO, os.sched_param(2 if thread == pid else 1))


def lateness(found: npt.NDArray[np.float64], seconds: float) -> npt.NDArray[np.float64]:
    """Of all timers that end in the next so many seconds."""
    first = int(found[0])
    time.sleep(seconds)
    return found[first + 1 : int(found[0]) + 1]


def told(values: Sequence[float] | npt.NDArray[np.float64]) -> dict[str, float]:
    names = {"p50": 50, "p99": 99, "p99.9": 99.9, "max": 100}
    return {name: round(float(np.percentile(values, cut)) * 1e3, 2) for name, cut in names.items()}


def send_bodies(port: int, form: str, arguments: argparse.Namespace, answered: Any, go_on: Any) -> None:
    os.nice(10)  # it stands for another machine
    path, content_type, body = request(form, tensor_file(arguments.rows, arguments.hidden))
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("POST", path, body, {"Content-Type": content_type})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        response.read()
        connection.close()
        answered.value += 1
        go_on.wait()


def request(form: str, file: bytes) -> tuple[str, str, bytes]:
    """Path, content type and body."""
    if form == "upload":
        return UPLOAD, RAW, file
    if form == "multipart":
        return "/v1/completions", FORM, multipart({"request": completion([part(part="rows")]), "rows": file})
    text = base64.b64encode(file).decode()
    if form == "base64":
        return "/v1/completions", "application/json", completion([part(data=text)])
    body = {"max_tokens": 1, "prompt": [5], "user": text}
    return "/v1/completions", "application/json", json.dumps(body).encode()


if __name__ == "__main__":
    main()
