"""One measured point: which server, what is sent, how much of it and when. Made by `campaign`, run by `workers`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from server.bench.http_connection import Target
from server.bench.records import Record
from server.bench.workloads import Workload


@dataclass(frozen=True)
class Job:
    """A closed loop where `arrivals` is None: `num_requests`, `concurrency` at a time. Else an open loop: request i is
    sent `arrivals[i]` seconds after the start, with at most `concurrency` (None: no limit) in flight."""

    target: Target
    workload: Workload
    num_requests: int
    concurrency: int | None
    arrivals: tuple[float, ...] | None = None
    warmup: int = 0
    """Requests, others than the measured ones, that are answered before the measuring starts. In no figure."""
    timeout: float = 600.0


@dataclass(frozen=True)
class Outcome:
    """What came of a job."""

    records: Sequence[Record]
    """By start."""
    cpu_share: float
    """Of the busiest client process: its CPU seconds per second of the window. Near 1, the client was the limit."""


def share(total: int, part: int, parts: int) -> int:
    """How many of `total` fall to process `part` of `parts`."""
    return total // parts + (part < total % parts)
