"""The keys and values of every cached row, in blocks, one pair of tensors a layer."""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """`keys[layer]` and `values[layer]`: [num_blocks, block_size, num_kv_heads, head_dim], on the device."""

    def __init__(self, shapes: list[tuple[int, int]], num_blocks: int, block_size: int, dtype: torch.dtype,
                 device: torch.device) -> None:  # fmt: skip
        """`shapes`: (num_kv_heads, head_dim) of each layer. Memory is touched only as rows are written."""
        self.num_blocks, self.block_size = num_blocks, block_size

        def allocate() -> list[Tensor]:
            # Zeros, not empty: rows past a sequence's end are read (and masked), and NaN would survive the mask.
            return [torch.zeros(num_blocks, block_size, *shape, dtype=dtype, device=device) for shape in shapes]

        self.keys, self.values = allocate(), allocate()

    def fill_with_garbage(self) -> None:
        for tensor in (*self.keys, *self.values):
            tensor.normal_(std=3.0)


def bytes_per_block(shapes: list[tuple[int, int]], block_size: int, dtype: torch.dtype) -> int:
    return sum(2 * heads * head_dim for heads, head_dim in shapes) * block_size * dtype.itemsize
