"""CUDA graphs of whole steps: one for the forward, one for sampling, at a ladder of sizes.

Made by `runner.device_step` at load, looked up in every step. All that changes from step to step is data on the device
(the schedule's record, the slots, the row buffer), so a graph serves every step that fits its size, with or without
embedding rows, whatever its sequences' lengths; the rest of it is padding. A decode graph has one row an entry. A mixed
graph has so many rows, split over entries in any way. Steps larger than the largest run eagerly.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from runner.sampler import Asks

log = logging.getLogger(__name__)

_DECODE_SIZES = (1, 2, 4, 8, 12, *range(16, 64, 8), *range(64, 128, 16), *range(128, 512, 32), *range(512, 4097, 128))
_MIXED_ENTRIES = (32, 96)
"""Entries of a mixed step that aren't there cost their share of a launch in every layer."""
_MIXED_ROWS = (16, 32, 64, 128, 192, 256, 384, 512, 576, 640, 768, 1024, 1280, 1536, 2048,
               3072, 4096, 5120, 6144, 7168, 8192)  # fmt: skip
_BESIDE = 32
"""Decodes beside which prompt rows are timed, if so many may run."""
_SAMPLING_ASKS = (Asks(), Asks(filters=True))
_WORTH_A_STEP = 128
"""Prompt rows: of fewer a prompt would need many steps, whatever they cost."""
_REPLAYS = 4
_MANY_ROWS = 2048
"""Beyond these, entries that aren't there no longer count."""


@dataclass(frozen=True)
class StepSize:
    """What a launch's grid depends on. Of a graph: the largest step that it serves."""

    rows: int
    entries: int
    decodes: int
    """The first so many entries may be decodes (`attention.triton_attention` says how a graph counts them)."""
    max_seq_len: int


class StepGraphs:
    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, short_seq_len: int) -> None:
        """`short_seq_len`: the attention's; steps without a longer sequence have graphs of their own."""
        self._seq_lens = [*({short_seq_len} if short_seq_len < max_model_len else ()), max_model_len]
        self._sizes = [*(size for size in _DECODE_SIZES if size < max_num_seqs), max_num_seqs]
        self._sampling: dict[tuple[int, Asks], torch.cuda.CUDAGraph] = {}
        self._decode: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        """By entries and the longest sequence."""
        self._entries = [*(size for size in _MIXED_ENTRIES if size < max_num_seqs), max_num_seqs]
        self._rows = [size for size in _MIXED_ROWS if size <= max_num_batched_tokens]
        self._mixed: dict[tuple[int, int, int], torch.cuda.CUDAGraph] = {}
        """By entries, rows and the longest sequence."""
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def mixed_sizes(self) -> list[int]:
        """Rows that mixed steps are padded to, ascending."""
        return sorted({rows for _, rows, _ in self._mixed})

    def capture(self, forward: Callable[[StepSize], object], sample: Callable[[int, Asks], object],
                progress: Callable[[str], None]) -> None:  # fmt: skip
        """Captures everything, largest first (the smaller ones then fit into its memory).

        Args:
            forward: launches a step's forward of that size. sample: the same for the sampling of so many entries.
        """
        works: list[tuple[dict[Any, torch.cuda.CUDAGraph], object, partial[object]]] = []
        for entries, fewer in zip(reversed(self._entries), [*reversed(self._entries[:-1]), 0], strict=True):
            for rows in reversed(self._rows):
                if rows <= fewer or (rows > _MANY_ROWS and entries < self._entries[-1]):
                    continue
                for seq_len in reversed(self._seq_lens):
                    size = StepSize(rows, entries, entries - 1, seq_len)
                    works.append((self._mixed, (entries, rows, seq_len), partial(forward, size)))
        for n in reversed(self._sizes):
            works += [
                (self._decode, (n, length), partial(forward, StepSize(n, n, n, length)))
                for length in reversed(self._seq_lens)
            ]
            works += [(self._sampling, (n, asks), partial(sample, n, asks)) for asks in _SAMPLING_ASKS]
        for done, (graphs, key, work) in enumerate(works, 1):
            graph = self._captured(work)
            if graph is not None:
                graphs[key] = graph
            progress(f"capturing CUDA graphs: {done} of {len(works)}")

    def _captured(self, work: partial[object]) -> torch.cuda.CUDAGraph | None:
        """None, with a warning, where it can't be captured: steps of that size then run eagerly."""
        stream = torch.cuda.current_stream()
        try:
            work()  # compiles kernels and picks algorithms, outside the capture
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                work()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            log.warning("a step of size %s can't be captured and runs eagerly: %s", work.args, error)
            # torch may leave its capturing stream the current one, and the pool marked as one that is being recorded
            # into: the next capture has to find neither.
            torch.cuda.set_stream(stream)
            self._pool = torch.cuda.graph_pool_handle()
            return None
        return graph

    def cheapest_prompt_rows(self) -> int | None:
        """Prompt rows beside some decodes that take the least time each, as the graphs take it when nothing is
        scheduled: all but attention. None where too little is captured to tell."""
        beside = min(_BESIDE, self._sizes[-1] - 1)
        decode = self.forward(StepSize(beside, beside, beside, 1))
        worth = [rows for rows in self.mixed_sizes if rows >= beside + _WORTH_A_STEP]
        sizes = [StepSize(rows, beside + 1, beside, 1) for rows in worth]
        mixed = {size.rows - beside: graph for size in sizes if (graph := self.forward(size)) is not None}
        if decode is None or not mixed:
            return None
        alone = _milliseconds(decode)
        costs: dict[int, float] = {rows: (_milliseconds(graph) - alone) / rows for rows, graph in mixed.items()}
        return min(costs, key=lambda rows: costs[rows])

    def forward(self, size: StepSize) -> torch.cuda.CUDAGraph | None:
        """The graph that serves a step's forward, if there is one."""
        seq_len = _fitting(self._seq_lens, size.max_seq_len)
        if size.decodes == size.entries:
            return self._decode.get((_fitting(self._sizes, size.entries), seq_len))
        rows = _fitting(self._rows, size.rows)
        entries = self._entries[-1] if rows > _MANY_ROWS else _fitting(self._entries, size.entries)
        return self._mixed.get((entries, rows, seq_len))

    def sampling(self, entries: int, asks: Asks) -> torch.cuda.CUDAGraph | None:
        return self._sampling.get((_fitting(self._sizes, entries), asks))


def _milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    """The least of a few replays."""
    times = list[float]()
    for _ in range(_REPLAYS):
        begin: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return min(times)


def _fitting(sizes: list[int], at_least: int) -> int:
    """The smallest of `sizes` that suffices; 0 where none does."""
    index = bisect.bisect_left(sizes, at_least)
    return sizes[index] if index < len(sizes) else 0
