"""Paged attention on the GPU: a split-KV kernel for decodes (`triton_decode`) and a flash-style kernel for everything
else (`triton_prefill`).

Chosen by `runner.trial` where there is a CUDA device. Nothing here looks at device data from the host: the launches
depend on the batch's static sizes alone, so a step is captured once and replayed with any schedule that fits it.

What a captured step may leave open: in a decode step (num_decodes == num_entries) entries without rows are padding. In
a mixed step the kernels look at each entry themselves: among the first `num_decodes`, those of one row are decodes. A
graph for mixed steps therefore takes num_entries as large as it may get and num_decodes = num_entries - 1. Rows past
the step's own are written as zeros.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from runner.attention.backend import AttentionBatch
from runner.attention.triton_decode import LONG_SPLIT, attend_decodes, decode_tiles
from runner.attention.triton_prefill import attend_prompts, prefill_tiles
from runner.attention.triton_tiles import Tiles


@functools.cache
def _beside(device: torch.device) -> Any:
    """A stream beside the current one, which has to wait for whatever it is given."""
    return torch.get_device_module(device).Stream()


class TritonAttention:
    """`AttentionBackend` for CUDA. Tiles are chosen by head size and dtype; give them to measure others."""

    capturable = True
    short_seq_len = LONG_SPLIT

    def __init__(self, decode_tiles: Tiles | None = None, prefill_tiles: Tiles | None = None) -> None:
        self._decode_tiles = decode_tiles
        self._prefill_tiles = prefill_tiles

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch, *, scale: float,
               window: int | None, softcap: float | None) -> Tensor:  # fmt: skip
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        common = (query, key_cache, value_cache, batch, out, scale, window, softcap)
        pure = batch.num_decodes == batch.num_entries
        if pure:
            self._attend_decodes(*common, pure)
        elif not batch.num_decodes:
            self._attend_prompts(*common)
        else:
            # Decodes wait for memory and prompts for the tensor cores: side by side they take less than in turn.
            streams, beside = torch.get_device_module(query.device), _beside(query.device)
            beside.wait_stream(streams.current_stream())
            self._attend_decodes(*common, pure)
            with streams.stream(beside):
                self._attend_prompts(*common)
            streams.current_stream().wait_stream(beside)
        return out

    def _attend_decodes(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch, out: Tensor,
                        scale: float, window: int | None, softcap: float | None, pure: bool) -> None:  # fmt: skip
        tiles = self._decode_tiles
        if tiles is None:
            entries = len(query) if pure else batch.num_decodes
            tiles = decode_tiles(query, key_cache.shape[2], entries)
        attend_decodes(query, key_cache, value_cache, batch, out, scale, window, softcap, tiles, pure)

    def _attend_prompts(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch, out: Tensor,
                        scale: float, window: int | None, softcap: float | None) -> None:  # fmt: skip
        """Every row but those of decodes, and zeros for padding."""
        group = query.shape[1] // key_cache.shape[2]
        tiles = self._prefill_tiles or prefill_tiles(query, group, batch.num_entries)
        attend_prompts(query, key_cache, value_cache, batch, out, scale, window, softcap, tiles)
