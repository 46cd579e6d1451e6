"""What /metrics exports: counters and histograms that the event loop keeps, gauges from the runner's last heartbeat.

Names are vLLM's under our own prefix, so that a dashboard needs only another prefix. Everything here is touched by one
thread, the event loop: observing is a bisection and two additions, without the locks of `prometheus_client`'s own
histograms, since inter-token latency is observed once per token.

One engine request is one prompt with its `n` choices; it is counted once, when its last choice has ended or when it was
aborted. Every family moves for every request, whichever way it ended.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from runner.messages import Stats

PREFIX = "intarsia:"

LATENCY_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
"""Seconds. From 1 ms on: a small model's tokens are 2 ms apart."""


class Histogram:
    """Counts per bucket and a sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float] = LATENCY_BUCKETS) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts as the exposition format wants them."""
        total, buckets = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets


class Metrics(Collector):
    """Everything measured in one API process."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.stats = Stats()
        """The runner's own gauges and counters, from its last heartbeat."""
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: dict[str, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self.rejected: dict[str, int] = {}
        self.responses: dict[int, int] = {}
        """HTTP responses by status: a bounded set, since the server chooses them all."""
        self.time_to_first_token = Histogram()
        self.inter_token_latency = Histogram()
        self.e2e_latency = Histogram()
        self.queue_time = Histogram()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def count_response(self, status: int) -> None:
        self.responses[status] = self.responses.get(status, 0) + 1

    def count_rejected(self, reason: str) -> None:
        self.rejected[reason] = self.rejected.get(reason, 0) + 1

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """The scrape's body and content type, in the format that the scraper accepts."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at each scrape."""
        stats = self.stats
        yield self._gauge("num_requests_running", "Choices that hold a slot.", stats.running)
        yield self._gauge("num_requests_waiting", "Choices that wait for a slot.", stats.waiting)
        used = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
        yield self._gauge("kv_cache_usage_perc", "Blocks in use, 0 to 1.", used)
        yield self._gauge("row_bytes", "Host memory held by prompt embeddings of unfinished requests.", stats.row_bytes)
        yield self._counter("num_preemptions", "Choices that lost their blocks and were recomputed.", stats.preemptions)
        yield self._counter("prefix_cache_queries", "Prompt rows looked up in the cache.", stats.prefix_queries)
        yield self._counter("prefix_cache_hits", "Prompt rows found in the cache.", stats.prefix_hits)
        yield self._counter("engine_steps", "Steps that the engine has run.", stats.steps)
        yield self._counter("prompt_tokens", "Prompt rows of requests that were started.", self.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", self.generation_tokens)
        yield self._labelled("request_success", "Requests that ended.", "finished_reason", self.finished)
        yield self._labelled("admission_rejections", "Requests that were not queued.", "reason", self.rejected)
        by_status = {str(status): count for status, count in sorted(self.responses.items())}
        yield self._labelled("http_responses", "HTTP responses.", "status", by_status)
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From submission to a choice's first token.", self.time_to_first_token),
            ("inter_token_latency_seconds", "Between a choice's tokens.", self.inter_token_latency),
            ("e2e_request_latency_seconds", "From submission to a request's end.", self.e2e_latency),
            ("request_queue_time_seconds", "From submission to a choice's first slot.", self.queue_time),
        ):
            family = HistogramMetricFamily(PREFIX + name, text, labels=["model_name"])
            family.add_metric([self.model_name], histogram.buckets(), histogram.sum)
            yield family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self.model_name], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self.model_name], value)
        return family

    def _labelled(self, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name", label])
        for key, value in values.items():
            family.add_metric([self.model_name, key], value)
        return family
