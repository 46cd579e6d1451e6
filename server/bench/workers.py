"""Spreads a job over client processes, so that the client is not what is measured, and brings their records together.

The parent starts `num_procs` processes once, and gives them one job after the other:

    parent    job ──►            wait for all, "go" ──►                 ◄── counts ──           collect
    process        warm up, "ready" ──►              send, read, record ─── twice a second ───► "done", records

So all measure the same window, which no process enters before every one is warm. In a closed loop they take request
numbers from one shared counter: none runs dry before the others. Processes are spawned, not forked: the parent may have
threads, and a test's parent has torch.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import msgspec

from server.bench.embeds_forms import uploaded
from server.bench.http_connection import CallFailed
from server.bench.jobs import Job, Outcome, share
from server.bench.load import Client, Tally, closed_loop, open_loop
from server.bench.records import Record

_WARMUP_SEED = 1_000_003
_REPORT_SECONDS = 0.5
_START_DELAY = 0.05
"""Open loop: from "go" to the schedule's zero, so that every process has heard of it."""
_DIED = "a client process died"

T = TypeVar("T")


class LoadError(Exception):
    """The job could not be run. The message is for the user."""


class _Counter(Protocol):
    """What is used of multiprocessing's shared integer."""

    value: int

    def get_lock(self) -> Any: ...


class Progress(msgspec.Struct):
    sent: int
    answered: int
    failed: int
    tokens: int


class _Done(msgspec.Struct):
    records: list[Record]
    cpu_seconds: float


OnProgress = Callable[[Progress], None]


class ClientProcesses:
    """`with ClientProcesses(4) as clients: clients.run(job)`."""

    def __init__(self, num_procs: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._counter: _Counter = context.Value("q", 0)
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for part in range(num_procs):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self._counter, part, num_procs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Processes that are in the middle of a job are killed: their connections close with them."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.terminate()
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._pipes, self._processes = [], []

    def run(self, job: Job, on_progress: OnProgress = lambda progress: None) -> Outcome:
        """Raises LoadError when no warm-up request is answered, or a process dies."""
        self._counter.value = 0
        self._tell_all(job)
        answers = [self._message(pipe) for pipe in self._pipes]
        complaint = _complaint(answers)
        zero = time.perf_counter() + _START_DELAY
        self._tell_all(zero if complaint is None else None)
        if complaint is not None:
            raise LoadError(complaint)
        parts = self._collect(on_progress)
        records = sorted((record for part in parts for record in part.records), key=lambda record: record.start)
        if not records:
            raise LoadError("no request was sent")
        seconds = max(record.end for record in records) - records[0].start
        return Outcome(records, max(part.cpu_seconds for part in parts) / max(seconds, 1e-9))

    def _collect(self, on_progress: OnProgress) -> list[_Done]:
        done: list[_Done] = []
        tallies = [Tally() for _ in self._pipes]
        waiting = list(self._pipes)
        while waiting:
            for pipe in wait(waiting):
                assert isinstance(pipe, Connection)  # noqa: S101 - `wait` takes other things too
                message = self._message(pipe)
                if isinstance(message, Tally):
                    tallies[self._pipes.index(pipe)] = message
                    on_progress(_sum(tallies))
                else:
                    done.append(msgspec.msgpack.decode(message, type=_Done))
                    waiting.remove(pipe)
        return done

    def _tell_all(self, message: Job | float | None) -> None:
        try:
            for pipe in self._pipes:
                pipe.send(message)
        except OSError:
            raise LoadError(_DIED) from None

    def _message(self, pipe: Connection) -> Any:
        try:
            return pipe.recv()
        except (EOFError, OSError):
            raise LoadError(_DIED) from None


def _complaint(answers: Sequence[tuple[int, list[str]]]) -> str | None:
    """What the processes' warming up says against going on."""
    failures = [detail for _, details in answers for detail in details]
    asked = sum(count for count, _ in answers)
    if not asked or len(failures) < asked:
        return None
    return f"none of the {asked} warm-up requests was answered: {failures[0]}"


def _sum(tallies: Sequence[Tally]) -> Progress:
    rows = [asdict(tally) for tally in tallies]
    return Progress(**{name: sum(row[name] for row in rows) for name in rows[0]})


# --- in the client process ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """Which of the processes this is."""

    part: int
    parts: int
    counter: _Counter

    def share(self, total: int) -> int:
        return share(total, self.part, self.parts)

    def next_index(self, end: int) -> int | None:
        with self.counter.get_lock():
            index = self.counter.value
            self.counter.value = index + 1
        return index if index < end else None


def _serve(pipe: Connection, counter: _Counter, part: int, parts: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business, and it ends us
    place = _Place(part, parts, counter)
    try:
        while True:
            _run_in_loop(_run_job(pipe.recv(), place, pipe))
    except* (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent has gone, whichever way


async def _run_job(job: Job, place: _Place, pipe: Connection) -> None:
    try:
        job = replace(job, workload=await uploaded(job.workload, job.target))
        warmed = await _warm_up(job, place)
        job.workload.prepare(0)  # what all of its requests share is made before they are sent, not with the first
    except CallFailed as error:
        warmed = 1, [error.detail]
    pipe.send(warmed)
    # The loop has nothing else to do: waiting in it costs nobody anything.
    zero: float | None = pipe.recv()
    if zero is None:
        return
    client = Client(job.target, job.workload, job.timeout)
    gc.collect()
    gc.freeze()
    began = time.process_time()
    async with asyncio.TaskGroup() as group:
        reports = group.create_task(_report(client.tally, pipe))
        records = await _drive(job, client, place, zero)
        reports.cancel()
    seconds = time.process_time() - began
    pipe.send(msgspec.msgpack.encode(_Done(records, seconds)))


async def _warm_up(job: Job, place: _Place) -> tuple[int, list[str]]:
    """How many were sent from here, and what went wrong with each that failed."""
    first = sum(share(job.warmup, part, place.parts) for part in range(place.part))
    todo = iter(range(first, first + place.share(job.warmup)))
    others = await uploaded(job.workload.others(_WARMUP_SEED), job.target)
    client = Client(job.target, others, job.timeout)
    width = place.share(max(job.concurrency or job.warmup, place.parts))
    records = await closed_loop(client, lambda: next(todo, None), width)
    return len(records), [record.detail for record in records if record.error is not None]


async def _drive(job: Job, client: Client, place: _Place, zero: float) -> list[Record]:
    if job.arrivals is None:
        width = place.share(job.concurrency or 1)
        return await closed_loop(client, lambda: place.next_index(job.num_requests), width)
    mine = [(index, job.arrivals[index]) for index in range(place.part, job.num_requests, place.parts)]
    width_or_none = None if job.concurrency is None else max(1, place.share(job.concurrency))
    return await open_loop(client, mine, zero, max_concurrency=width_or_none)


async def _report(tally: Tally, pipe: Connection) -> None:
    while True:
        pipe.send(tally)
        await asyncio.sleep(_REPORT_SECONDS)


def _run_in_loop(work: Coroutine[Any, Any, T]) -> T:
    try:
        import uvloop
    except ImportError:  # an optional part of uvicorn
        return asyncio.run(work)
    return uvloop.run(work)
