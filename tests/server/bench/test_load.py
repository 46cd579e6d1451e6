"""The drivers in virtual time: how many are in flight, when each is sent, what is written down of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from server.bench.arrivals import Arrivals
from server.bench.completion_stream import CompletionStream
from server.bench.http_connection import CallFailed, HttpConnection, Target
from server.bench.load import Client, closed_loop, open_loop
from server.bench.records import Record
from server.bench.summary import concurrency_steps, peak_concurrency
from server.bench.workloads import Common, RandomIds
from tests.server.bench.scripted_http import DONE, token, usage
from tests.server.bench.virtual_loop import run_virtually

TARGET = Target.parse("http://127.0.0.1:1")


@dataclass
class ScriptedConnection:
    """Answers by itself: first token after `ttft`, then one each `gap`; requests whose number is in `fails` fail."""

    ttft: float
    gap: float
    tokens: int
    closed: bool = False

    async def call(self, method: str, path: str, body: object, sink: object, content_type: str) -> None:
        assert isinstance(sink, CompletionStream)
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self.ttft)
        sink.on_status(200, loop.time())
        sink.on_body(token(), loop.time())
        for _ in range(self.tokens - 1):
            await asyncio.sleep(self.gap)
            sink.on_body(token(), loop.time())
        sink.on_body(usage(7, self.tokens) + DONE, loop.time())

    def close(self) -> None:
        self.closed = True


@dataclass
class ScriptedClient(Client):
    ttft: float = 0.1
    gap: float = 0.02
    tokens: int = 6
    connections: list[ScriptedConnection] = field(default_factory=list)

    def connect(self) -> HttpConnection:
        self.connections.append(ScriptedConnection(self.ttft, self.gap, self.tokens))
        return self.connections[-1]  # type: ignore[return-value]


def client(**options: float) -> ScriptedClient:
    made = ScriptedClient(TARGET, RandomIds(Common("m", output_len=6), 3), **options)  # type: ignore[arg-type]
    made.clock = asyncio.get_running_loop().time
    return made


def test_closed_loop() -> None:
    """10 requests of 0.2 s, 4 at a time: three rounds, of 4, 4 and 2."""

    async def main() -> tuple[list[Record], ScriptedClient]:
        made, numbers = client(), iter(range(10))
        return await closed_loop(made, lambda: next(numbers, None), 4), made

    records, made = run_virtually(main())
    assert sorted(record.index for record in records) == list(range(10))
    assert peak_concurrency(records) == 4
    assert max(record.end for record in records) == pytest.approx(0.6)
    assert sorted(round(record.start, 6) for record in records) == [0.0] * 4 + [0.2] * 4 + [0.4] * 2
    for record in records:
        assert record.ttft == pytest.approx(0.1)
        assert record.tpot == pytest.approx(0.02)
        assert record.e2el == pytest.approx(0.2)
        assert record.gaps == pytest.approx([0.02] * 5)
        assert (record.kind, record.num_tokens, record.prompt_tokens, record.expected_tokens) == ("ids", 6, 7, 6)
        assert record.scheduled is None
    assert len(made.connections) == 4
    assert all(connection.closed for connection in made.connections)
    assert (made.tally.sent, made.tally.answered, made.tally.failed, made.tally.tokens) == (10, 10, 0, 60)


def test_open_loop_sends_on_time_whatever_is_in_flight() -> None:
    async def main() -> tuple[list[Record], ScriptedClient]:
        made = client(ttft=1.0)
        times = Arrivals(10.0, burstiness=None).times(8)
        return await open_loop(made, enumerate(times), 5.0), made

    records, made = run_virtually(main())
    by_index = sorted(records, key=lambda record: record.index)
    assert [record.start for record in by_index] == pytest.approx([5.0 + number / 10 for number in range(8)])
    assert [record.scheduled for record in by_index] == pytest.approx([record.start for record in by_index])
    assert peak_concurrency(records) == 8
    assert all(connection.closed for connection in made.connections)


def test_open_loop_keeps_connections() -> None:
    async def main() -> ScriptedClient:
        made = client(ttft=0.01, gap=0.0)
        await open_loop(made, enumerate(Arrivals(10.0, burstiness=None).times(8)), 0.0)
        return made

    assert len(run_virtually(main()).connections) == 1


def test_open_loop_with_a_limit_says_how_late_it_is() -> None:
    """One at a time, 0.2 s each, due every 0.1 s: each is sent 0.1 s later than the one before was."""

    async def main() -> list[Record]:
        times = Arrivals(10.0, burstiness=None).times(5)
        return await open_loop(client(), enumerate(times), 0.0, max_concurrency=1)

    records = run_virtually(main())
    assert peak_concurrency(records) == 1
    late = [record.start - record.scheduled for record in records if record.scheduled is not None]
    assert late == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])


def test_a_request_that_takes_too_long() -> None:
    async def main() -> list[Record]:
        numbers = iter(range(1))
        made = client(gap=1.0)
        made.timeout = 2.5
        return await closed_loop(made, lambda: next(numbers, None), 1)

    (record,) = run_virtually(main())
    assert (record.error, record.end) == ("timeout", 2.5)
    assert record.num_events == 3  # what had come is kept, but is in no figure


def test_a_failure_is_a_record() -> None:
    class Failing(ScriptedConnection):
        async def call(self, method: str, path: str, body: object, sink: object, content_type: str) -> None:
            raise CallFailed("disconnected", "gone")

    async def main() -> tuple[list[Record], ScriptedClient]:
        numbers = iter(range(3))
        made = client()
        made.connect = lambda: Failing(0, 0, 0)  # type: ignore[assignment, method-assign, return-value]
        return await closed_loop(made, lambda: next(numbers, None), 1), made

    records, made = run_virtually(main())
    assert [(record.error, record.detail) for record in records] == [("disconnected", "gone")] * 3
    assert (made.tally.answered, made.tally.failed) == (0, 3)


def test_concurrency_steps() -> None:
    records = [Record(0, "ids", 0.0, 2.0), Record(1, "ids", 1.0, 3.0), Record(2, "ids", 2.0, 2.5)]
    assert concurrency_steps(records) == [(0.0, 1), (1.0, 2), (2.0, 1), (2.0, 2), (2.5, 1), (3.0, 0)]
