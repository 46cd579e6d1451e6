"""Figures out of records: throughput over the common window, latencies, goodput, errors by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from server.bench.jobs import Outcome
from server.bench.records import Record

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Distribution:
    """Of values in milliseconds. Percentiles interpolate linearly between the values."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Distribution | None:
        """None where there is no value."""
        if not seconds:
            return None
        values = np.asarray(seconds, dtype=np.float64) * 1e3
        p50, p90, p99 = (float(value) for value in np.percentile(values, PERCENTILES))
        return cls(len(values), float(values.mean()), p50, p90, p99, float(values.max()))

    def body(self) -> dict[str, float]:
        return {name: round(value, 3) for name, value in vars(self).items() if name != "count"}


@dataclass(frozen=True)
class Summary:
    """Of one point. Requests that failed count in `errors` and in nothing else."""

    seconds: float
    """The window: from the first request that was sent to the last token (or failure) of any process. The sum of the
    rounds' windows, if there are several."""
    num_sent: int
    num_answered: int
    errors: Mapping[str, int]
    error_examples: Mapping[str, str]
    input_tokens: int | None
    """None where the server sent no usage."""
    cached_tokens: int | None
    output_tokens: int
    token_events: int
    """Fewer than tokens where a server puts several into one event, whose gaps are then not per token."""
    num_wrong_length: int
    """Answered with another number of tokens than asked for."""
    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2el: Distribution | None
    lateness: Distribution | None
    """Open loop: how much later than scheduled requests were sent."""
    good: int | None
    """Answered requests that met every limit of the goodput, if there is one."""
    peak_concurrency: int
    cpu_share: float

    @property
    def requests_per_second(self) -> float:
        return self.num_answered / self.seconds

    @property
    def output_tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds

    def body(self) -> dict[str, Any]:
        """For JSON. Milliseconds where the name ends so."""
        figures: dict[str, Any] = {
            "seconds": round(self.seconds, 4),
            "sent": self.num_sent,
            "answered": self.num_answered,
            "failed": self.num_sent - self.num_answered,
            "requests_per_second": round(self.requests_per_second, 4),
            "output_tokens_per_second": round(self.output_tokens_per_second, 2),
            "input_tokens": self.input_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "token_events": self.token_events,
            "wrong_length": self.num_wrong_length,
            "peak_concurrency": self.peak_concurrency,
            "client_cpu_share": round(self.cpu_share, 3),
        }
        for name in ("ttft", "tpot", "itl", "e2el", "lateness"):
            distribution: Distribution | None = getattr(self, name)
            if distribution is not None:
                figures[f"{name}_ms"] = distribution.body()
        if self.good is not None:
            figures["good"] = self.good
            figures["goodput_requests_per_second"] = round(self.good / self.seconds, 4)
        figures["errors"] = dict(self.errors)
        figures["error_examples"] = dict(self.error_examples)
        return figures


Limits = Mapping[str, float]
"""Of the goodput: seconds by "ttft", "tpot", "itl" (a request's longest gap) or "e2el"."""


def summarise(outcomes: Sequence[Outcome], limits: Limits | None = None) -> Summary:
    """Of one job or several rounds of it, each with at least one record. Rounds' windows add up."""
    records = [record for outcome in outcomes for record in outcome.records]
    answered = [record for record in records if record.error is None]
    failed = [record for record in records if record.error is not None]
    late = [record.start - record.scheduled for record in records if record.scheduled is not None]
    return Summary(
        seconds=sum(window(outcome.records) for outcome in outcomes),
        num_sent=len(records),
        num_answered=len(answered),
        errors=dict(Counter(str(record.error) for record in failed).most_common()),
        error_examples={str(record.error): record.detail for record in reversed(failed)},
        input_tokens=_sum_known(answered, lambda record: record.prompt_tokens),
        cached_tokens=_sum_known(answered, lambda record: record.cached_tokens),
        output_tokens=sum(record.num_tokens for record in answered),
        token_events=sum(record.num_events for record in answered),
        num_wrong_length=sum(record.num_tokens != record.expected_tokens for record in answered),
        ttft=Distribution.of([record.ttft for record in answered]),
        tpot=Distribution.of([record.tpot for record in answered if record.tpot is not None]),
        itl=Distribution.of([gap for record in answered for gap in record.gaps]),
        e2el=Distribution.of([record.e2el for record in answered]),
        lateness=Distribution.of(late),
        good=None if limits is None else sum(is_good(record, limits) for record in answered),
        peak_concurrency=max(peak_concurrency(outcome.records) for outcome in outcomes),
        cpu_share=max(outcome.cpu_share for outcome in outcomes),
    )


def window(records: Sequence[Record]) -> float:
    """Seconds. An answered request ends with its last token: what a server sends after it is not waited for."""
    first = min(record.start for record in records)
    last = max(record.end if record.error is not None else record.last or record.end for record in records)
    return max(last - first, 1e-9)


def is_good(record: Record, limits: Limits) -> bool:
    """Whether an answered request met every limit. One without a second token meets those on what comes after it."""
    values = {
        "ttft": record.ttft,
        "tpot": record.tpot or 0.0,
        "itl": max(record.gaps, default=0.0),
        "e2el": record.e2el,
    }
    return all(values[name] <= limit for name, limit in limits.items())


def peak_concurrency(records: Sequence[Record]) -> int:
    """The most requests that were in flight at one moment."""
    return max((count for _, count in concurrency_steps(records)), default=0)


def concurrency_steps(records: Sequence[Record]) -> list[tuple[float, int]]:
    """(moment, requests in flight from then on), ascending. At one moment ends come before starts."""
    changes = sorted([(record.start, 1) for record in records] + [(record.end, -1) for record in records])
    steps, count = [], 0
    for moment, change in changes:
        count += change
        steps.append((moment, count))
    return steps


def _sum_known(records: Sequence[Record], value: Callable[[Record], int | None]) -> int | None:
    known = [number for record in records if (number := value(record)) is not None]
    return sum(known) if known else None
