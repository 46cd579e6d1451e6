"""Client processes against a scripted server: nothing sent twice or left out, one window, and failures by kind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from server.bench.http_connection import Target
from server.bench.jobs import Job, Outcome
from server.bench.prompt_files import StoredPrompt, StoredPrompts
from server.bench.summary import summarise
from server.bench.workers import ClientProcesses, LoadError, Progress
from server.bench.workloads import Common, Prepared
from tests.server.bench.scripted_http import (
    DONE,
    LAST_CHUNK,
    STREAM_HEAD,
    Exchange,
    Script,
    Served,
    chunk,
    serving,
    token,
    usage,
    whole,
)
from tests.server.harness import ROOT, eventually, is_alive

WARMUP_ROWS = 64
TOKENS = 4


@pytest.fixture(scope="module")
def clients() -> Iterator[ClientProcesses]:
    """Two processes for all tests: they take one job after the other."""
    with ClientProcesses(2) as clients:
        yield clients


def job(target: Target, prompts: int, **options: object) -> Job:
    """Prompts [100], [101], …: the server sees which is which."""
    workload = StoredPrompts(Common("m", TOKENS), tuple(StoredPrompt(ids=(100 + n,)) for n in range(prompts)))
    return replace(Job(target, workload, prompts, concurrency=3), **options)  # type: ignore[arg-type]


def prompt_of(exchange: Exchange) -> list[int]:
    prompt: list[int] = json.loads(exchange.body)["prompt"]
    return prompt


@dataclass(frozen=True)
class Noted(StoredPrompts):
    """Notes when a request is prepared. (What it warms up with is another workload's.)"""

    file: str = ""

    def prepare(self, index: int) -> Prepared:
        with open(self.file, "a") as file:
            file.write(f"{time.perf_counter()}\n")
        return super().prepare(index)


async def answer(exchange: Exchange) -> None:
    pieces = [token() for _ in range(TOKENS)]
    exchange.writer.write(STREAM_HEAD)
    for piece in pieces:
        exchange.writer.write(chunk(piece))
        await exchange.writer.drain()
        await asyncio.sleep(0.001)
    exchange.writer.write(chunk(usage(len(prompt_of(exchange)), TOKENS) + DONE) + LAST_CHUNK)


async def misbehave(exchange: Exchange) -> None:
    """By the prompt's number; every fifth is answered."""
    number = prompt_of(exchange)[0] - 100 if len(prompt_of(exchange)) == 1 else 0
    if number % 5 == 0:
        await answer(exchange)
    elif number % 5 == 1:
        exchange.writer.write(whole(429, b'{"error":{"message":"full"}}'))
    elif number % 5 == 2:
        error = b'data: {"error":{"message":"died","code":"engine_failed"}}\n\n'
        exchange.writer.write(STREAM_HEAD + chunk(token()) + chunk(error + DONE) + LAST_CHUNK)
    elif number % 5 == 3:
        exchange.writer.write(STREAM_HEAD + chunk(token()) + LAST_CHUNK)
    else:
        exchange.writer.write(STREAM_HEAD + chunk(token()))
        exchange.hang_up()


def run(script: Script, work: Callable[[Target], Outcome]) -> tuple[Outcome, Served]:
    async def main() -> tuple[Outcome, Served]:
        async with serving(script) as served:
            return await asyncio.wait_for(asyncio.to_thread(work, served.target), 60), served

    return asyncio.run(main())


def test_closed_loop(clients: ClientProcesses) -> None:
    seen: list[Progress] = []
    asked, three = list[Exchange](), asyncio.Event()

    async def answer_three_at_once(exchange: Exchange) -> None:
        """The first ones that are measured wait for each other: a quick process would be done before a slow one."""
        if len(prompt_of(exchange)) == 1:
            asked.append(exchange)
            if len(asked) == 3:
                three.set()
            await three.wait()
        await answer(exchange)

    outcome, served = run(answer_three_at_once, lambda target: clients.run(job(target, 31, warmup=5), seen.append))
    assert sorted(record.index for record in outcome.records) == list(range(31))
    counted = Counter(len(prompt_of(exchange)) for exchange in served.exchanges)
    assert counted == {1: 31, WARMUP_ROWS: 5}
    assert {tuple(prompt_of(exchange)) for exchange in served.exchanges if len(prompt_of(exchange)) == 1} == {
        (100 + number,) for number in range(31)
    }
    figures = summarise([outcome])
    assert (figures.num_answered, figures.output_tokens, figures.input_tokens) == (31, 31 * TOKENS, 31)
    assert (figures.errors, figures.num_wrong_length, figures.peak_concurrency) == ({}, 0, 3)
    assert figures.token_events == 31 * TOKENS
    assert figures.itl is not None and figures.itl.count == 31 * (TOKENS - 1)
    # Three connections for warming up, three for measuring, over both processes.
    assert served.connections == 6
    starts = [record.start for record in outcome.records]
    assert starts == sorted(starts)
    assert seen and seen[-1].sent <= 31


def test_what_requests_share_is_made_before_the_first_is_sent(clients: ClientProcesses, tmp_path: Path) -> None:
    """The first `prepare` of a process makes it, and it may take as long as an answer."""
    prompts = tuple(StoredPrompt(ids=(100 + n,)) for n in range(8))
    workload = Noted(Common("m", TOKENS), prompts, file=str(tmp_path / "times"))
    outcome, _ = run(answer, lambda target: clients.run(replace(job(target, 8, warmup=2), workload=workload)))
    times = sorted(map(float, (tmp_path / "times").read_text().splitlines()))
    assert len(times) == 2 + 8
    assert times[1] < min(record.start for record in outcome.records)


def test_open_loop(clients: ClientProcesses) -> None:
    times = tuple(number / 100 for number in range(20))
    outcome, served = run(answer, lambda target: clients.run(job(target, 20, concurrency=None, arrivals=times)))
    assert sorted(record.index for record in outcome.records) == list(range(20))
    assert len(served.exchanges) == 20
    scheduled = sorted((record.index, record.scheduled or 0.0) for record in outcome.records)
    assert [moment - scheduled[0][1] for _, moment in scheduled] == pytest.approx(times)
    assert all(record.start >= (record.scheduled or 0.0) for record in outcome.records)


def test_failures_by_kind(clients: ClientProcesses) -> None:
    outcome, _ = run(misbehave, lambda target: clients.run(job(target, 20, warmup=2)))
    figures = summarise([outcome])
    kinds = {"http_429": 4, "stream_error:engine_failed": 4, "truncated": 8}
    assert figures.errors == kinds
    assert figures.error_examples["http_429"] == "HTTP 429: full"
    assert figures.error_examples["stream_error:engine_failed"] == "died"
    assert (figures.num_answered, figures.output_tokens) == (4, 4 * TOKENS)


def test_more_processes_than_requests(clients: ClientProcesses) -> None:
    outcome, served = run(answer, lambda target: clients.run(job(target, 1, concurrency=1, warmup=1)))
    assert (len(outcome.records), len(served.exchanges)) == (1, 2)


def test_nothing_is_measured_where_nothing_warms_up(clients: ClientProcesses, unused_port: int) -> None:
    target = Target.parse(f"http://127.0.0.1:{unused_port}")
    with pytest.raises(LoadError, match=r"none of the 3 warm-up requests was answered: .* refuses connections"):
        clients.run(job(target, 5, warmup=3))


def test_a_server_that_is_not_there(clients: ClientProcesses, unused_port: int) -> None:
    """The processes are fit for the next job after the failure above."""
    outcome = clients.run(job(Target.parse(f"http://127.0.0.1:{unused_port}"), 5))
    assert summarise([outcome]).errors == {"connection_refused": 5}


def test_client_processes_follow_their_parent() -> None:
    """Also when it is killed while they are at work."""

    async def never(exchange: Exchange) -> None:
        await asyncio.sleep(60)

    def kill_when_busy(served: Served) -> tuple[list[int], str]:
        command = [sys.executable, "-m", "server.cli", "bench", "serve", "--model", "m", "--url"]
        command += [f"http://127.0.0.1:{served.port}", "--concurrency", "2", "--procs", "2", "--warmup", "0"]
        command += ["--vocab-size", "100"]  # else the server is asked first
        parent = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        eventually(lambda: len(served.exchanges) == 2)
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        parent.kill()
        return list(map(int, children)), parent.communicate(timeout=60)[1]

    async def main() -> None:
        async with serving(never) as served:
            children, complaint = await asyncio.to_thread(kill_when_busy, served)
            assert len(children) >= 2
            await asyncio.to_thread(eventually, lambda: not any(map(is_alive, children)))
            assert "Traceback" not in complaint

    asyncio.run(main())


def test_a_client_process_that_has_died() -> None:
    with ClientProcesses(1) as clients:
        os.kill(clients._processes[0].pid, signal.SIGKILL)
        with pytest.raises(LoadError, match="a client process died"):
            clients.run(job(Target.parse("http://127.0.0.1:9"), 1))


def test_a_client_process_that_dies_at_work() -> None:
    async def deadly(exchange: Exchange) -> None:
        os.kill(pids.pop(), signal.SIGKILL)

    with ClientProcesses(1) as clients:
        pids = [clients._processes[0].pid]
        with pytest.raises(LoadError, match="a client process died"):
            run(deadly, lambda target: clients.run(job(target, 1, concurrency=1)))
