"""What /metrics exports: counters and histograms that event loops keep, gauges from the runner's last heartbeat.

Names are vLLM's under our own prefix, so that a dashboard needs only another prefix. Each API process writes numbers of
its own, on its event loop's thread, and whichever is asked exports the sums over all (see `shared_cells`). Observing is
a bisection and two additions, since inter-token latency is observed once per token.

One engine request is one prompt with its `n` choices; it is counted once, when its last choice has ended or when it was
aborted. Every family moves for every request, whichever way it ended.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from runner.messages import Stats
from server.shared_cells import SharedCells

PREFIX = "intarsia:"

LATENCY_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
"""Seconds. From 1 ms on: a small model's tokens are 2 ms apart."""
_BOUNDS = (*map(str, LATENCY_BUCKETS), "+Inf")
_HISTOGRAM_CELLS = len(_BOUNDS) + 1

FINISHED = ("stop", "length", "abort", "error")
REJECTED = ("queue_full", "rows_full", "invalid", "unavailable")
STATUSES = tuple(map(str, range(100, 600)))
"""A bounded set: the server chooses them all."""


class Counter:
    """One number that grows."""

    __slots__ = ("_cell", "_row")

    def __init__(self, row: memoryview[float], cell: int) -> None:
        self._row, self._cell = row, cell

    def add(self, amount: float = 1.0) -> None:
        self._row[self._cell] += amount

    @property
    def value(self) -> float:
        """This process's."""
        return self._row[self._cell]


class Counters:
    """A counter for each value of a label."""

    def __init__(self, row: memoryview[float], first: int, labels: Sequence[str]) -> None:
        self._by_label = {label: Counter(row, first + index) for index, label in enumerate(labels)}

    def __getitem__(self, label: str) -> Counter:
        return self._by_label[label]

    def values(self) -> dict[str, int]:
        """This process's, where they aren't 0."""
        return {label: int(counter.value) for label, counter in self._by_label.items() if counter.value}


class Histogram:
    """A count for each bucket, and the sum."""

    __slots__ = ("_first", "_row", "_sum")

    def __init__(self, row: memoryview[float], first: int) -> None:
        self._row, self._first, self._sum = row, first, first + len(_BOUNDS)

    def observe(self, value: float) -> None:
        self._row[self._first + bisect_left(LATENCY_BUCKETS, value)] += 1
        self._row[self._sum] += value


class Metrics(Collector):
    """Everything measured in one API process, and a view of what is measured in all of them.

    `cells`: memory for `Metrics.CELLS` numbers a worker, shared by them; None where there is only one. `process`: whose
    memory, CPU time and open files are exported; the same one whoever is asked, so that they don't jump.
    """

    _PROMPT_TOKENS, _GENERATION_TOKENS = 0, 1
    _FINISHED = 2
    _REJECTED = _FINISHED + len(FINISHED)
    _RESPONSES = _REJECTED + len(REJECTED)
    _TIME_TO_FIRST_TOKEN = _RESPONSES + len(STATUSES)
    _INTER_TOKEN_LATENCY = _TIME_TO_FIRST_TOKEN + _HISTOGRAM_CELLS
    _E2E_LATENCY = _INTER_TOKEN_LATENCY + _HISTOGRAM_CELLS
    _QUEUE_TIME = _E2E_LATENCY + _HISTOGRAM_CELLS
    CELLS = _QUEUE_TIME + _HISTOGRAM_CELLS

    def __init__(
        self, model_name: str, cells: SharedCells | None = None, row: int = 0, process: int | None = None
    ) -> None:
        self.model_name = model_name
        self.stats = Stats()
        """The runner's own gauges and counters, from its last heartbeat."""
        self._cells = cells or SharedCells(1, self.CELLS)
        mine = self._cells.row(row)
        self.prompt_tokens = Counter(mine, self._PROMPT_TOKENS)
        self.generation_tokens = Counter(mine, self._GENERATION_TOKENS)
        self.finished = Counters(mine, self._FINISHED, FINISHED)
        self.rejected = Counters(mine, self._REJECTED, REJECTED)
        self.responses = Counters(mine, self._RESPONSES, STATUSES)
        self.time_to_first_token = Histogram(mine, self._TIME_TO_FIRST_TOKEN)
        self.inter_token_latency = Histogram(mine, self._INTER_TOKEN_LATENCY)
        self.e2e_latency = Histogram(mine, self._E2E_LATENCY)
        self.queue_time = Histogram(mine, self._QUEUE_TIME)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        pid = process or os.getpid()
        ProcessCollector(pid=lambda: pid, registry=self._registry)

    def count_response(self, status: int) -> None:
        self.responses[str(status)].add()

    def count_rejected(self, reason: str) -> None:
        self.rejected[reason].add()

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """The scrape's body and content type, in the format that the scraper accepts."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at each scrape."""
        stats, totals = self.stats, self._cells.totals()
        yield self._gauge("num_requests_running", "Choices that hold a slot.", stats.running)
        yield self._gauge("num_requests_waiting", "Choices that wait for a slot.", stats.waiting)
        used = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
        yield self._gauge("kv_cache_usage_perc", "Blocks in use, 0 to 1.", used)
        yield self._gauge("row_bytes", "Host memory held by prompt embeddings of unfinished requests.", stats.row_bytes)
        yield self._counter("num_preemptions", "Choices that lost their blocks and were recomputed.", stats.preemptions)
        yield self._counter("prefix_cache_queries", "Prompt rows looked up in the cache.", stats.prefix_queries)
        yield self._counter("prefix_cache_hits", "Prompt rows found in the cache.", stats.prefix_hits)
        yield self._counter("engine_steps", "Steps that the engine has run.", stats.steps)
        prompt_tokens, generation_tokens = totals[self._PROMPT_TOKENS], totals[self._GENERATION_TOKENS]
        yield self._counter("prompt_tokens", "Prompt rows of requests that were started.", prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", generation_tokens)
        finished = dict(zip(FINISHED, totals[self._FINISHED :], strict=False))
        yield self._labelled("request_success", "Requests that ended.", "finished_reason", finished)
        rejected = _not_zero(REJECTED, totals[self._REJECTED :])
        yield self._labelled("admission_rejections", "Requests that were not queued.", "reason", rejected)
        responses = _not_zero(STATUSES, totals[self._RESPONSES :])
        yield self._labelled("http_responses", "HTTP responses.", "status", responses)
        for name, text, first in (
            ("time_to_first_token_seconds", "From submission to a choice's first token.", self._TIME_TO_FIRST_TOKEN),
            ("inter_token_latency_seconds", "Between a choice's tokens.", self._INTER_TOKEN_LATENCY),
            ("e2e_request_latency_seconds", "From submission to a request's end.", self._E2E_LATENCY),
            ("request_queue_time_seconds", "From submission to a choice's first slot.", self._QUEUE_TIME),
        ):
            yield self._histogram(name, text, totals[first : first + _HISTOGRAM_CELLS])

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self.model_name], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self.model_name], value)
        return family

    def _labelled(self, name: str, text: str, label: str, values: dict[str, float]) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name", label])
        for key, value in values.items():
            family.add_metric([self.model_name, key], value)
        return family

    def _histogram(self, name: str, text: str, cells: Sequence[float]) -> Metric:
        *counts, total = cells
        buckets, below = [], 0.0
        for bound, count in zip(_BOUNDS, counts, strict=True):
            below += count
            buckets.append((bound, below))
        family = HistogramMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self.model_name], buckets, total)
        return family


def _not_zero(labels: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    return {label: value for label, value in zip(labels, values, strict=False) if value}
