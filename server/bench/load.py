"""Drives requests inside one client process: closed loop (so many at a time) or open loop (at given times).

Called by `workers`, in each client process. Time is read through `Client.clock` alone, so that tests can set it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field

from server.bench.completion_stream import CompletionStream
from server.bench.http_connection import CallFailed, Clock, HttpConnection, Target
from server.bench.records import Record
from server.bench.workloads import Workload

NextIndex = Callable[[], int | None]
"""The number of the next request, or None when there are no more. Shared by all client processes of a closed loop."""


@dataclass(slots=True)
class Tally:
    """How far this process is: what the live progress shows."""

    sent: int = 0
    answered: int = 0
    failed: int = 0
    tokens: int = 0


@dataclass
class Client:
    """Sends a workload's requests to one server and keeps a record of each."""

    target: Target
    workload: Workload
    timeout: float = 600.0
    """Seconds that a request may take in all."""
    clock: Clock = time.perf_counter
    tally: Tally = field(default_factory=Tally)

    async def ask(self, connection: HttpConnection, index: int, scheduled: float | None = None) -> Record:
        """One request to its end. A failure is a record too; never raises one."""
        request = self.workload.prepare(index)
        stream = CompletionStream()
        self.tally.sent += 1
        start = self.clock()
        record = Record(index, request.kind, start, start, scheduled, expected_tokens=request.output_len)
        try:
            async with asyncio.timeout(self.timeout):
                await connection.call("POST", request.path, request.body, stream, request.content_type)
            stream.finish()
        except TimeoutError:
            record.error, record.detail = "timeout", f"no whole answer within {self.timeout:g} s"
        except CallFailed as error:
            record.error, record.detail = error.kind, error.detail
        record.end = self.clock()
        _fill(record, stream)
        self._count(record)
        return record

    def connect(self) -> HttpConnection:
        return HttpConnection(self.target, clock=self.clock)

    def _count(self, record: Record) -> None:
        if record.error is None:
            self.tally.answered += 1
            self.tally.tokens += record.num_tokens
        else:
            self.tally.failed += 1


def _fill(record: Record, stream: CompletionStream) -> None:
    record.status, record.first, record.last = stream.status, stream.first, stream.last
    record.gaps, record.num_events = stream.gaps, stream.num_events
    record.prompt_tokens, record.completion_tokens = stream.prompt_tokens, stream.completion_tokens
    record.cached_tokens = stream.cached_tokens


async def closed_loop(client: Client, next_index: NextIndex, concurrency: int) -> list[Record]:
    """`concurrency` requests at a time until `next_index` says None. Each slot has a connection of its own."""
    records: list[Record] = []

    async def slot(connection: HttpConnection) -> None:
        while (index := next_index()) is not None:
            records.append(await client.ask(connection, index))

    with ExitStack() as stack:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                connection = client.connect()
                stack.callback(connection.close)
                group.create_task(slot(connection))
    return records


async def open_loop(
    client: Client,
    arrivals: Iterable[tuple[int, float]],
    zero: float,
    *,
    max_concurrency: int | None = None,
) -> list[Record]:
    """Requests at their times, whether those before have been answered or not.

    `arrivals`: (index, seconds after `zero`), ascending. With `max_concurrency` a request whose time has come waits
    until there is room; how late it was sent is in its record.
    """
    records: list[Record] = []
    idle: list[HttpConnection] = []
    room = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)

    async def send(index: int, scheduled: float) -> None:
        connection = idle.pop() if idle else client.connect()
        try:
            records.append(await client.ask(connection, index, scheduled))
        finally:
            idle.append(connection)
            if room is not None:
                room.release()

    try:
        async with asyncio.TaskGroup() as group:
            for index, offset in arrivals:
                await _until(zero + offset, client.clock)
                if room is not None:
                    await room.acquire()
                group.create_task(send(index, zero + offset))
    finally:
        for connection in idle:
            connection.close()
    return records


async def _until(moment: float, clock: Clock) -> None:
    """At least one turn of the event loop, so that a schedule which lies in the past can't hold it."""
    await asyncio.sleep(max(0.0, moment - clock()))
    while (early := moment - clock()) > 0:  # noqa: ASYNC110 - uvloop's timers count whole milliseconds
        await asyncio.sleep(early)
