"""`python -m tests.bench.client_rate`: how much the load generator itself can take, against the stub server, and what
httpx would cost in its place. Prints JSON lines.

CPU time per event is the figure that other processes on the machine disturb least; what a client process can read is
its inverse. The stub needs CPU too: on a machine with few cores it is what limits the rate.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
import urllib.request
from collections.abc import Iterator

import httpx
import msgspec

from server.bench.http_connection import Target
from server.bench.jobs import Job
from server.bench.summary import summarise
from server.bench.workers import ClientProcesses
from server.bench.workloads import Common, RandomIds
from tests import leash
from tests.server.harness import eventually, free_port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--num-requests", type=int, default=1024)
    parser.add_argument("--procs", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--tokens-per-second", type=float, nargs="+", default=[30_000, 45_000, 60_000])
    arguments = parser.parse_args()
    for rate in arguments.tokens_per_second:
        with stub(rate) as url:
            for procs in arguments.procs:
                ours(url, rate, arguments.concurrency, arguments.num_requests, procs)
    with stub(20_000) as url:
        asyncio.run(with_httpx(url, arguments.concurrency))


@contextlib.contextmanager
def stub(rate: float) -> Iterator[str]:
    port = free_port()
    process = leash.start("tests.bench.stub_server", "--port", str(port), "--tokens-per-second", str(rate))
    url = f"http://127.0.0.1:{port}"
    try:
        eventually(lambda: _answers(port))
        yield url
    finally:
        process.terminate()
        leash.end(process)


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def ours(url: str, rate: float, concurrency: int, num_requests: int, procs: int) -> None:
    workload = RandomIds(Common("stub"), 512)
    with ClientProcesses(procs) as clients:
        outcome = clients.run(Job(Target.parse(url), workload, num_requests, concurrency, warmup=concurrency))
    figures = summarise([outcome])
    events = figures.token_events / procs
    report(
        client="ours",
        offered=rate,
        procs=procs,
        tokens_per_second=round(figures.output_tokens_per_second),
        busiest_process=round(figures.cpu_share, 2),
        cpu_us_per_event=round(figures.cpu_share * figures.seconds / events * 1e6, 1),
    )


async def with_httpx(url: str, concurrency: int) -> None:
    """One process: its event loop, httpx's lines, and the same decoding."""
    decode = msgspec.json.Decoder(dict[str, object]).decode
    body = {"prompt": [5] * 512, "max_tokens": 128}
    count = 0

    async def one(client: httpx.AsyncClient) -> None:
        nonlocal count
        async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    count += bool(decode(line[6:])["choices"])

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        began, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(one(client) for _ in range(concurrency)))
        wall, seconds = time.perf_counter() - began, time.process_time() - cpu
    report(
        client="httpx",
        offered=20_000,
        procs=1,
        tokens_per_second=round(count / wall),
        busiest_process=round(seconds / wall, 2),
        cpu_us_per_event=round(seconds / count * 1e6, 1),
    )


def report(**figures: object) -> None:
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
