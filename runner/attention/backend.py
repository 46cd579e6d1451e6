"""The protocol of an attention backend, the batch that it works on, and the bridge from transformers' modules to it.

Transformers calls `attend` from inside every attention module (it is registered in `AttentionInterface`); `attend`
writes the layer's keys and values into the cache and asks the backend for the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

from runner.kernels.cache_write import write_kv

IMPLEMENTATION = "intarsia"
"""The name under which transformers knows `attend`. No mask function is registered under it: transformers then builds
no mask at all, where a registered one would look for packed sequences with a device sync in every forward."""


class AttentionBackend(Protocol):
    capturable: bool
    """Its launches depend on the batch's static sizes alone, so that a CUDA graph of them serves any schedule."""
    short_seq_len: int
    """Where no sequence is longer, launches that leave no room for longer ones are cheaper."""

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch, *, scale: float,
               window: int | None, softcap: float | None) -> Tensor:  # fmt: skip
        """Attention of each row over its own sequence's cached rows up to its own, or to `batch.attend_until`.

        Args:
            query: [T, num_heads, head_dim].
            key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim]; this step's rows are in.
            scale: of the scores. window: a row sees itself and window - 1 rows before it.
            softcap: scores become softcap * tanh(scores / softcap).

        Returns:
            [T, num_heads, head_dim]; rows of padding hold anything finite.
        """
        ...


@dataclass
class AttentionBatch:
    """One step, as attention sees it. Tensors on the device, in the layout of `kernels.prepare`."""

    backend: AttentionBackend
    key_caches: list[Tensor]
    value_caches: list[Tensor]
    block_table: Tensor
    """[S, blocks_per_seq] int32, by slot."""
    entry_slots: Tensor
    """[S + 1] int32: the slot of each entry."""
    entry_starts: Tensor
    """[S + 1] int32: the first row of each entry."""
    seq_lens: Tensor
    """[S] int32"""
    positions: Tensor
    """[T] int64"""
    cache_index: Tensor
    """[T] int64"""
    num_entries: int
    num_decodes: int
    """The first so many entries have one row each; in a captured mixed step: may have."""
    max_seq_len: int
    host_starts: list[int]
    """`entry_starts` and `seq_lens` of the step's own entries, on the host (the schedule knows them)."""
    host_seq_lens: list[int]
    attend_until: Tensor | None = None
    """[T] int32 (`slots.StepInputs`), for models some of whose rows attend both ways."""
    plan: Any = None
    """The backend's own: what it worked out in the first layer for all of them."""


_UNKNOWN = ("s_aux", "position_bias", "alibi")
"""What some modules ask of an attention besides: attention sinks, and terms added to the scores."""


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    *,
    attention_batch: AttentionBatch,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`AttentionInterface` entry: query [1, num_heads, T, head_dim], key and value [1, num_kv_heads, T, head_dim];
    returns [1, T, num_heads, head_dim]. Raises NotImplementedError where a module asks for what backends don't do."""
    for name in _UNKNOWN:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"attention with {name!r}")
    batch = attention_batch
    layer: int = module.layer_idx  # type: ignore[assignment]
    key_cache, value_cache = batch.key_caches[layer], batch.value_caches[layer]
    write_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), key_cache, value_cache, batch.cache_index)
    rows = query[0].transpose(0, 1)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = batch.backend.attend(rows, key_cache, value_cache, batch, scale=scale, window=sliding_window, softcap=softcap)
    return out[None], None


AttentionInterface.register(IMPLEMENTATION, attend)
