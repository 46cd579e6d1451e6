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

import torch

log = logging.getLogger(__name__)

_DECODE_SIZES = (1, 2, 4, 8, 12, *range(16, 64, 8), *range(64, 128, 16), *range(128, 512, 32), *range(512, 4097, 128))
_MIXED_SIZES = (16, 32, 64, 128, 192, 256, 384, 512, 576, 640, 768, 1024, 1280, 1536, 2048)


@dataclass(frozen=True)
class StepSize:
    """What a launch's grid depends on. Of a graph: the largest step that it serves."""

    rows: int
    entries: int
    decodes: int
    """The first so many entries may be decodes (`attention.triton_attention` says how a graph counts them)."""
    max_seq_len: int


class StepGraphs:
    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> None:
        self._sampling: dict[int, torch.cuda.CUDAGraph] = {}
        self._decode: dict[int, torch.cuda.CUDAGraph] = {}
        self._mixed: dict[int, torch.cuda.CUDAGraph] = {}
        self._max_num_seqs, self._max_model_len = max_num_seqs, max_model_len
        self._decode_sizes = [*(size for size in _DECODE_SIZES if size < max_num_seqs), max_num_seqs]
        self._mixed_sizes = [size for size in _MIXED_SIZES if size <= max_num_batched_tokens]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, forward: Callable[[StepSize], object], sample: Callable[[int], object],
                progress: Callable[[str], None]) -> None:  # fmt: skip
        """Captures everything, largest first (the smaller ones then fit into its memory).

        Args:
            forward: launches a step's forward of that size. sample: the same for the sampling of so many entries.
        """
        decodes = {n: StepSize(n, n, n, self._max_model_len) for n in reversed(self._decode_sizes)}
        entries = self._max_num_seqs
        mixed = {n: StepSize(n, entries, entries - 1, self._max_model_len) for n in reversed(self._mixed_sizes)}
        works: list[tuple[dict[int, torch.cuda.CUDAGraph], int, Callable[[], object]]] = []
        works += [(self._mixed, n, partial(forward, size)) for n, size in mixed.items()]
        works += [(self._decode, n, partial(forward, size)) for n, size in decodes.items()]
        works += [(self._sampling, n, partial(sample, n)) for n in decodes]
        for done, (graphs, size, work) in enumerate(works, 1):
            graph = self._captured(work)
            if graph is not None:
                graphs[size] = graph
            progress(f"capturing CUDA graphs: {done} of {len(works)}")
        for graphs, sizes in ((self._mixed, self._mixed_sizes), (self._decode, self._decode_sizes)):
            sizes[:] = [size for size in sizes if size in graphs]

    def _captured(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph | None:
        """None, with a warning, where it can't be captured: steps of that size then run eagerly."""
        try:
            work()  # compiles kernels and picks algorithms, outside the capture
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                work()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            log.warning("a step of this size can't be captured and runs eagerly: %s", error)
            return None
        return graph

    def forward(self, rows: int, entries: int, decodes: int) -> torch.cuda.CUDAGraph | None:
        """The graph that serves a step's forward, if any does."""
        if decodes == entries:
            return _smallest(self._decode, self._decode_sizes, entries)
        return _smallest(self._mixed, self._mixed_sizes, rows)

    def sampling(self, entries: int) -> torch.cuda.CUDAGraph | None:
        return _smallest(self._sampling, self._decode_sizes, entries)


def _smallest(graphs: dict[int, torch.cuda.CUDAGraph], sizes: list[int], at_least: int) -> torch.cuda.CUDAGraph | None:
    index = bisect.bisect_left(sizes, at_least)
    return graphs.get(sizes[index]) if index < len(sizes) else None
