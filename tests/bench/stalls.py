"""`python -m tests.bench.stalls`: for how long the event loop of an API process stands still while large bodies arrive.

The application behind uvicorn with an engine that accepts everything; another process sends 64 MiB of rows (safetensors
in base64 in JSON, about 85 MB) again and again. A timer of one millisecond says how late it is called: what a stream or
a probe would have waited. Prints one JSON line: lateness in ms without and with bodies, and how many were answered. On
a machine with other work the first of the two shows what that work does.

    python -m tests.bench.stalls [--rows 8192] [--hidden 4096] [--seconds 5] [--kind rows|text]
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import http.client
import json
import multiprocessing
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import uvicorn
import uvloop
from safetensors.numpy import save

from server.http_protocol import LimitedHttpProtocol
from tests.server.fakes import MODEL, FakeEngine, Line, application, services
from tests.server.harness import free_port

_TICK = 0.001


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument(
        "--kind", choices=("rows", "text"), default="rows", help="text: the same bytes as a long string"
    )
    arguments = parser.parse_args()
    print(json.dumps(vars(arguments) | uvloop.run(measure(arguments))), flush=True)


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    rows, hidden = arguments.rows, arguments.hidden
    model = msgspec.structs.replace(MODEL, dtype="float16", hidden_size=hidden, max_model_len=rows + 16)
    engine = FakeEngine(lambda _ids, _choice: Line([5], "length"))
    app = application(services(engine, model=model))
    port = free_port()
    config = uvicorn.Config(app, port=port, http=LimitedHttpProtocol, log_config=None, lifespan="off", access_log=False)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0.01)
    context = multiprocessing.get_context("spawn")
    answered, go_on = context.Value("i", 0), context.Event()
    client = context.Process(target=send_bodies, args=(port, vars(arguments), answered, go_on))
    client.start()
    while not answered.value:  # the first one warms up
        assert client.exitcode is None, "the client has failed"
        await asyncio.sleep(0.01)
    await asyncio.sleep(1)
    quiet = await lateness(arguments.seconds)
    before = answered.value
    go_on.set()
    busy = await lateness(arguments.seconds)
    bodies = answered.value - before
    client.terminate()
    client.join()
    server.should_exit = True
    await serving
    return {"quiet_ms": told(quiet), "busy_ms": told(busy), "bodies": bodies}


async def lateness(seconds: float) -> list[float]:
    found, end = [], time.perf_counter() + seconds
    while (due := time.perf_counter() + _TICK) < end:
        await asyncio.sleep(_TICK)
        found.append(time.perf_counter() - due)
    return found


def told(values: Sequence[float]) -> dict[str, float]:
    cuts = np.percentile(values, (50, 99, 99.9)) * 1e3
    return {
        "p50": round(cuts[0], 2),
        "p99": round(cuts[1], 2),
        "p99.9": round(cuts[2], 2),
        "max": round(max(values) * 1e3, 2),
    }


def send_bodies(port: int, arguments: dict[str, Any], answered: Any, go_on: Any) -> None:
    rows = np.ones((arguments["rows"], arguments["hidden"]), dtype=np.float16)
    text = base64.b64encode(save({"rows": rows})).decode()
    field = {"prompt_embeds": text} if arguments["kind"] == "rows" else {"prompt": [5], "user": text}
    body = json.dumps({"max_tokens": 1, **field}).encode()
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        response.read()
        connection.close()
        answered.value += 1
        go_on.wait()


if __name__ == "__main__":
    main()
