"""What /metrics exports: counters and histograms that event loops keep, and the runner's from its last heartbeat.

What there is, and what it means, is declared in `metric_families`. Each API process writes numbers of its own, on its
event loop's thread, and whichever is asked exports the sums over all (see `shared_cells`).

One engine request is one prompt with its `n` choices; it is counted once, when its last choice has ended or when it was
aborted. Every family of requests moves for every request, whichever way it ended, so their counts agree; and every
token that a client was given is in generation_tokens, in one of the two latencies and in its request's count.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from runner.messages import HistogramCounts, ModelInfo, Stats
from server import metric_families as families
from server.metric_families import ENGINE_FAMILIES, PREFIX, SERVER_FAMILIES, VLLM_PREFIX, Family
from server.shared_cells import SharedCells

_Value = float | Sequence[float] | HistogramCounts


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

    def __contains__(self, label: str) -> bool:
        return label in self._by_label

    def values(self) -> dict[str, int]:
        """This process's, where they aren't 0."""
        return {label: int(counter.value) for label, counter in self._by_label.items() if counter.value}


class Histogram:
    """A count for each bucket, and the sum."""

    __slots__ = ("_bounds", "_first", "_row", "_sum")

    def __init__(self, row: memoryview[float], first: int, bounds: Sequence[float]) -> None:
        self._row, self._first, self._sum, self._bounds = row, first, first + len(bounds) + 1, bounds

    def observe(self, value: float, times: int = 1) -> None:
        self._row[self._first + bisect_left(self._bounds, value)] += times
        self._row[self._sum] += value * times

    @property
    def count(self) -> int:
        """This process's."""
        return int(sum(self._row[self._first : self._sum]))


def _size(family: Family) -> int:
    """Cells that it takes."""
    return len(family.bounds) + 2 if family.bounds else len(family.values) or 1


def _layout() -> dict[str, int]:
    """Where each family's cells begin."""
    places, place = {}, 0
    for family in SERVER_FAMILIES:
        places[family.name] = place
        place += _size(family)
    return places


class Metrics(Collector):
    """Everything measured in one API process, and a view of what is measured in all of them.

    `cells`: memory for `Metrics.CELLS` numbers a worker, shared by them; None where there is only one. `process`: whose
    memory, CPU time and open files are exported; the same one whoever is asked, so that they don't jump. `as_vllm`:
    what vLLM measures, too, is exported a second time under its names.
    """

    _PLACES = _layout()
    CELLS = sum(map(_size, SERVER_FAMILIES)) + 1
    """The last one is no family's: API requests that are being answered, for /load."""

    def __init__(
        self,
        model_name: str,
        cells: SharedCells | None = None,
        row: int = 0,
        process: int | None = None,
        *,
        as_vllm: bool = False,
        prefix_caching: bool = True,
    ) -> None:
        self.model_name = model_name
        self.stats = Stats()
        """The runner's own gauges and counters, from its last heartbeat."""
        self.model: ModelInfo | None = None
        """Set once it is loaded."""
        self._prefix_caching = prefix_caching
        self._as_vllm = as_vllm
        self._cells = cells or SharedCells(1, self.CELLS)
        self._mine = self._cells.row(row)
        self._mine[-1] = 0.0  # what a worker left that died in this row
        self.prompt_tokens = self._counter(families.PROMPT_TOKENS)
        self.prompt_tokens_cached = self._counter(families.PROMPT_TOKENS_CACHED)
        self.generation_tokens = self._counter(families.GENERATION_TOKENS)
        self.embedding_rows = self._counter(families.EMBEDDING_ROWS)
        self.embedding_bytes = self._counter(families.EMBEDDING_BYTES)
        self.finished = self._counters(families.REQUESTS_FINISHED)
        self.rejected = self._counters(families.REQUESTS_REJECTED)
        self.responses = self._counters(families.HTTP_RESPONSES)
        self.errors = self._counters(families.ERRORS)
        self.time_to_first_token = self._histogram(families.TIME_TO_FIRST_TOKEN)
        self.inter_token_latency = self._histogram(families.INTER_TOKEN_LATENCY)
        self.e2e_latency = self._histogram(families.E2E_LATENCY)
        self.queue_time = self._histogram(families.QUEUE_TIME)
        self.prefill_time = self._histogram(families.PREFILL_TIME)
        self.decode_time = self._histogram(families.DECODE_TIME)
        self.inference_time = self._histogram(families.INFERENCE_TIME)
        self.request_prompt_tokens = self._histogram(families.REQUEST_PROMPT_TOKENS)
        self.request_generation_tokens = self._histogram(families.REQUEST_GENERATION_TOKENS)
        self.request_n = self._histogram(families.REQUEST_N)
        self.request_max_tokens = self._histogram(families.REQUEST_MAX_TOKENS)
        self.embedding_decode_time = self._histogram(families.EMBEDDING_DECODE_TIME)
        self.grammar_compile_time = self._histogram(families.GRAMMAR_COMPILE_TIME)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        pid = process or os.getpid()
        ProcessCollector(pid=lambda: pid, registry=self._registry)

    def count_response(self, status: int) -> None:
        self.responses[str(status)].add()

    def count_rejected(self, reason: str) -> None:
        self.rejected[reason].add()

    def count_error(self, code: str) -> None:
        """An error that a client was told, by its code, or by its type if it has none."""
        self.errors[code if code in self.errors else "other"].add()

    def exposition(self) -> tuple[bytes, str]:
        """The scrape's body and content type: the text format, whatever the scraper would like best. (To one that asks
        for OpenMetrics, as Prometheus does, prometheus_client 0.26 writes samples without the colon in their names.)"""
        encode, content_type = choose_encoder("")
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at each scrape."""
        values = self._values()
        for family, value in values:
            yield _exported(PREFIX, family, value, {"model_name": self.model_name})
        yield from self._cache_config(PREFIX, {})
        if self._as_vllm:
            labels = {"model_name": self.model_name, "engine": "0"}
            for family, value in values:
                if family.in_vllm:
                    yield _exported(VLLM_PREFIX, family, value, labels)
            yield from self._cache_config(VLLM_PREFIX, {"engine": "0"})

    def count_in_flight(self, change: int) -> None:
        self._mine[-1] += change

    @property
    def in_flight(self) -> int:
        """API requests that are being answered, by all API processes."""
        return int(self._cells.totals()[-1])

    def _values(self) -> list[tuple[Family, _Value]]:
        stats, totals = self.stats, self._cells.totals()
        values: list[tuple[Family, _Value]] = [(family, family.read(stats)) for family in ENGINE_FAMILIES]
        for family in SERVER_FAMILIES:
            first = self._PLACES[family.name]
            cells = totals[first : first + _size(family)]
            if family.bounds:
                values.append((family, HistogramCounts(tuple(map(int, cells[:-1])), cells[-1])))
            else:
                values.append((family, cells if family.label else cells[0]))
        return values

    def _cache_config(self, prefix: str, labels: dict[str, str]) -> Iterator[Metric]:
        """Nothing before the model is loaded: its labels must not change."""
        if self.model is not None:
            model = self.model
            labels = {
                "block_size": str(model.block_size),
                "cache_dtype": model.dtype,
                "enable_prefix_caching": str(self._prefix_caching),
                "max_model_len": str(model.max_model_len),
                "max_num_seqs": str(model.max_num_seqs),
                "model_name": self.model_name,
                "num_gpu_blocks": str(model.num_blocks),
                **labels,
            }
            yield _exported(prefix, families.CACHE_CONFIG, 1.0, labels)

    def _counter(self, family: Family) -> Counter:
        return Counter(self._mine, self._PLACES[family.name])

    def _counters(self, family: Family) -> Counters:
        return Counters(self._mine, self._PLACES[family.name], family.values)

    def _histogram(self, family: Family) -> Histogram:
        return Histogram(self._mine, self._PLACES[family.name], family.bounds)


def _exported(prefix: str, family: Family, value: _Value, labels: dict[str, str]) -> Metric:
    """As prometheus_client takes it."""
    name, names, own = prefix + family.name, list(labels), list(labels.values())
    if isinstance(value, HistogramCounts):
        histogram = HistogramMetricFamily(name, family.text, labels=names)
        histogram.add_metric(own, _buckets(family.bounds, value.counts), value.sum)
        return histogram
    kind = GaugeMetricFamily if family.kind == "gauge" else CounterMetricFamily
    metric = kind(name, family.text, labels=[*names, *([family.label] if family.label else [])])
    if isinstance(value, Sequence):
        for label, each in zip(family.values, value, strict=True):
            if each or family.every_value:
                metric.add_metric([*own, label], each)
    else:
        metric.add_metric(own, value)
    return metric


def _buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Cumulative, as Prometheus has them. `counts` empty: the runner has not told yet."""
    buckets, below = [], 0
    for index, bound in enumerate((*map(str, bounds), "+Inf")):
        below += counts[index] if counts else 0
        buckets.append((bound, float(below)))
    return buckets
