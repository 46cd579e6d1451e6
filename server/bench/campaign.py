"""Runs what the command line asks for: one point, or a sweep of concurrencies, against one server or two in turn.

Two servers are measured in one run, in the order A B, B A, A B, …, with the same requests: what the machine does
meanwhile then falls on both alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from server.bench.http_connection import Target
from server.bench.jobs import Job, Outcome
from server.bench.summary import Limits, Summary, summarise
from server.bench.workers import ClientProcesses, Progress
from server.bench.workloads import Workload

_ROUND_SEED = 7_919


@dataclass(frozen=True)
class Server:
    """One that is measured."""

    url: str
    target: Target
    model: str


@dataclass
class Point:
    """One load against one server; several rounds of it when it was asked for."""

    server: Server
    label: str
    """What tells the load from the others of the run: "concurrency 8", "rate 4/s"."""
    concurrency: int | None
    outcomes: list[Outcome] = field(default_factory=list)

    def summary(self, limits: Limits | None) -> Summary:
        """Of all rounds together."""
        return summarise(self.outcomes, limits)


@dataclass(frozen=True)
class Level:
    """One load, for whichever server."""

    label: str
    num_requests: int
    concurrency: int | None
    warmup: int
    arrivals: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Campaign:
    servers: Sequence[Server]
    levels: Sequence[Level]
    workload_of: Callable[[str, int], Workload]
    """Makes the workload for a model's name and a number added to its seed."""
    rounds: int = 1
    timeout: float = 600.0

    def run(self, clients: ClientProcesses, watch: Callable[[Point, int, int, Progress], None]) -> Iterator[Point]:
        """Each point when it is complete. `watch(point, round, requests in all, progress)` is called meanwhile.

        Raises LoadError.
        """
        for number, level in enumerate(self.levels):
            points = [Point(server, level.label, level.concurrency) for server in self.servers]
            for round_ in range(self.rounds):
                # Other prompts each time: a prefix cache would know them otherwise.
                seed = _ROUND_SEED * (number * self.rounds + round_)
                for point in points if round_ % 2 == 0 else reversed(points):
                    job = self._job(level, point.server, seed)
                    outcome = clients.run(job, self._watcher(watch, point, round_, level))
                    point.outcomes.append(outcome)
            yield from points

    def _job(self, level: Level, server: Server, seed: int) -> Job:
        return Job(
            target=server.target,
            workload=self.workload_of(server.model, seed),
            num_requests=level.num_requests,
            concurrency=level.concurrency,
            arrivals=level.arrivals,
            warmup=level.warmup,
            timeout=self.timeout,
        )

    def _watcher(
        self, watch: Callable[[Point, int, int, Progress], None], point: Point, round_: int, level: Level
    ) -> Callable[[Progress], None]:
        return lambda progress: watch(point, round_, level.num_requests, progress)
