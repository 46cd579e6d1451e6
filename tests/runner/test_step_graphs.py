"""Which captured graph a step gets, and what a failed capture leaves behind. The graphs are stand-ins: what they would
replay is tests/gpu's business."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from runner import step_graphs
from runner.sampler import Asks
from runner.step_graphs import StepGraphs, StepSize

SIZES = [(1, 8192), (1, 16), (3, 10), (8, 64), (33, 40), (96, 512), (200, 8192), (256, 256), (256, 8192), (600, 16384)]
"""(max_num_seqs, max_num_batched_tokens)"""


class FakeGraph:
    """Holds the size that was captured into it."""

    size: Any = None


class FakeCuda:
    """Stands in for what `StepGraphs` takes from torch.cuda. As torch does, a capture that fails leaves its own stream
    the current one, and its pool marked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream, self.recording, self.failing = "main", set[int](), set[Any]()
        self.captured: list[Any] = []
        self._graph: FakeGraph | None = None
        handles = itertools.count()
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
        monkeypatch.setattr(torch.cuda, "graph", self._capture)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.stream)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self, "stream", stream))

    @contextmanager
    def _capture(self, graph: FakeGraph, pool: int) -> Iterator[None]:
        assert self.stream == "main", "captured from another capture's stream"
        if pool in self.recording:
            raise RuntimeError("already recording to this pool")
        self.recording.add(pool)
        self.stream, self._graph = "capturing", graph
        yield
        if graph.size in self.failing:
            raise RuntimeError("operation not permitted when stream is capturing")
        self._graph, self.stream = None, "main"
        self.recording.remove(pool)

    def work(self, *size: Any) -> None:
        if self._graph is not None:
            self._graph.size = size[0] if len(size) == 1 else size
            self.captured.append(self._graph.size)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def captured(cuda: FakeCuda, max_num_seqs: int, max_rows: int, progress: Callable[[str], None] = print) -> StepGraphs:
    graphs = StepGraphs(max_num_seqs, max_rows, 1000, 300)
    graphs.capture(cuda.work, cuda.work, progress)
    return graphs


def decode(entries: int) -> StepSize:
    return StepSize(entries, entries, entries, 1000)


@pytest.mark.parametrize(("max_num_seqs", "max_rows"), SIZES)
def test_every_step_fits_the_graph_that_serves_it(cuda: FakeCuda, max_num_seqs: int, max_rows: int) -> None:
    graphs = captured(cuda, max_num_seqs, max_rows)
    for entries, seq_len in itertools.product(range(1, max_num_seqs + 1), (1, 300, 301, 1000)):
        size: StepSize = graphs.forward(StepSize(entries, entries, entries, seq_len)).size  # type: ignore[union-attr]
        assert size.rows == size.entries == size.decodes
        assert entries <= size.entries <= max_num_seqs
        assert size.entries < 2 * entries or size.entries <= 4
        assert size.max_seq_len == (300 if seq_len <= 300 else 1000)
    largest = max(
        (size.rows for size in cuda.captured if isinstance(size, StepSize) and size.decodes < size.rows), default=0
    )
    for entries, rows, seq_len in itertools.product(
        (1, 2, 31, 32, 33, 96, 97, max_num_seqs), range(2, max_rows + 1, 7), (300, 301)
    ):
        # Mixed: at least one entry has more rows than one.
        if entries > max_num_seqs or rows <= entries:
            continue
        graph: Any = graphs.forward(StepSize(rows, entries, entries - 1, seq_len))
        if rows > largest:
            assert graph is None
            continue
        size = graph.size
        assert rows <= size.rows <= max_rows and entries <= size.entries <= max_num_seqs
        # The attention kernels look for decodes among the first `decodes`: the last entry of a mixed step is none.
        assert entries - 1 <= size.decodes == size.entries - 1
        assert size.max_seq_len == (300 if seq_len == 300 else 1000)


def test_no_sequence_is_longer_than_short(cuda: FakeCuda) -> None:
    graphs = StepGraphs(8, 64, 1000, 1000)
    graphs.capture(cuda.work, cuda.work, print)
    sizes = [size for size in cuda.captured if isinstance(size, StepSize)]
    assert {size.max_seq_len for size in sizes} == {1000} and len(sizes) == len(set(sizes))
    assert graphs.forward(StepSize(3, 3, 3, 7)).size == StepSize(4, 4, 4, 1000)  # type: ignore[union-attr]


@pytest.mark.parametrize(("max_num_seqs", "max_rows"), SIZES)
def test_sampling(cuda: FakeCuda, max_num_seqs: int, max_rows: int) -> None:
    graphs = captured(cuda, max_num_seqs, max_rows)
    for entries in range(1, max_num_seqs + 1):
        for asks in (Asks(), Asks(filters=True)):
            size, served = graphs.sampling(entries, asks).size  # type: ignore[union-attr]
            assert entries <= size <= max_num_seqs and served == asks
        assert graphs.sampling(entries, Asks(penalties=True)) is None


def test_no_graph_is_captured_twice_or_for_nothing(cuda: FakeCuda) -> None:
    stages: list[str] = []
    graphs = captured(cuda, 256, 8192, stages.append)
    assert len(cuda.captured) == len(set(cuda.captured)) == len(stages)
    served: set[Any] = set()
    for entries, seq_len in itertools.product(range(1, 257), (300, 1000)):
        served.add(graphs.forward(StepSize(entries, entries, entries, seq_len)).size)  # type: ignore[union-attr]
        for rows in range(entries + 1, 8193, 3):
            served.add(graphs.forward(StepSize(rows, entries, entries - 1, seq_len)).size)  # type: ignore[union-attr]
    assert served == {size for size in cuda.captured if isinstance(size, StepSize)}


def test_the_larger_graphs_come_first(cuda: FakeCuda) -> None:
    """The smaller ones then fit into their memory."""
    captured(cuda, 64, 1024)
    rows = [size.rows for size in cuda.captured if isinstance(size, StepSize) and size.entries == 64 != size.decodes]
    assert rows == sorted(rows, reverse=True) and rows[0] == 1024
    decodes = [size.rows for size in cuda.captured if isinstance(size, StepSize) and size.decodes == size.entries]
    assert decodes == sorted(decodes, reverse=True) and decodes[0] == 64


def test_a_capture_that_fails_costs_its_own_size_only(cuda: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    cuda.failing = {StepSize(8, 8, 8, 1000), (4, Asks())}
    with caplog.at_level(logging.WARNING):
        graphs = captured(cuda, 8, 64)
    assert cuda.stream == "main"
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "rows=8" in caplog.text and "(4, Asks(" in caplog.text
    assert graphs.forward(decode(8)) is None and graphs.forward(decode(5)) is None
    assert graphs.forward(StepSize(8, 8, 8, 300)) is not None
    assert graphs.sampling(3, Asks()) is None
    assert all(graphs.forward(decode(n)) is not None for n in (1, 2, 4))
    assert all(graphs.forward(StepSize(rows, n, n - 1, 1000)) is not None for rows in (16, 64) for n in (1, 8))
    assert all(graphs.sampling(n, Asks(filters=True)) is not None for n in (1, 4, 8))
    assert all(graphs.sampling(n, Asks()) is not None for n in (2, 5, 8))


def test_out_of_memory_is_not_survived(cuda: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    """It would only come back in the first large step."""

    def work(*size: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError):
        StepGraphs(8, 64, 1000, 300).capture(work, work, print)


@pytest.mark.parametrize(
    "max_num_seqs, times, expected",
    [
        # Reading the weights of a large model takes longer than computing with a few hundred rows …
        (256, {64: 5.0, 128: 5.8, 192: 6.4, 256: 6.9, 384: 9.3, 512: 12.1, 1024: 22.4, 2048: 45.0}, 256 - 32),
        # … and of a small one a step's launches take longer than either.
        (256, {128: 5.3, 256: 5.6, 512: 6.1, 1024: 6.7, 2048: 8.1}, 2048 - 32),
        # Thirty-two rows are cheaper still, but no pace for prompts.
        (256, {64: 4.91, 256: 6.9, 512: 12.1, 2048: 45.0}, 256 - 32),
        (8, {16: 4.91, 256: 6.9, 512: 12.1, 2048: 45.0}, 256 - 7),
    ],
)
def test_prompt_rows_that_cost_least_beside_decodes(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, max_num_seqs: int, times: dict[int, float], expected: int
) -> None:
    graphs = captured(cuda, max_num_seqs, 2048)

    def milliseconds(graph: Any) -> float:
        size: StepSize = graph.size
        return 4.9 if size.decodes == size.entries else times.get(size.rows, 1000.0)

    monkeypatch.setattr(step_graphs, "_milliseconds", milliseconds)
    assert graphs.cheapest_prompt_rows() == expected


def test_prompt_rows_are_not_timed_where_too_little_is_captured(cuda: FakeCuda) -> None:
    assert captured(cuda, 64, 96).cheapest_prompt_rows() is None
    cuda.failing = {StepSize(32, 32, 32, 300)}
    assert captured(cuda, 64, 2048).cheapest_prompt_rows() is None
