"""Turns a step's rows into the model's input: a table row for each token, the client's vector for each embedding.

Called by `runner.device_step` between `prepare` and the model. The whole padded batch goes through one gather; a subset
never does (a subset's size would need a sync, break graphs and leave rows behind).
"""

from __future__ import annotations

import torch
from torch import Tensor


def gather_rows(token_ids: Tensor, is_token_ids: Tensor, rows: Tensor, table: Tensor, out: Tensor) -> None:
    """out[i] = table[token_ids[i]] where is_token_ids[i], else rows[i].

    Args:
        token_ids: [T] int32, clamped into the table. is_token_ids: [T] bool.
        rows: [>= T, hidden], read only at embedding rows (elsewhere it may hold anything, NaN too).
        table: [vocab, hidden]. out: [T, hidden]; all of one dtype and device.
    """
    if out.is_cuda:
        from runner.kernels.embed_triton import gather_rows_triton

        gather_rows_triton(token_ids, is_token_ids, rows, table, out)
    else:
        gather_rows_reference(token_ids, is_token_ids, rows, table, out)


def gather_rows_reference(token_ids: Tensor, is_token_ids: Tensor, rows: Tensor, table: Tensor, out: Tensor) -> None:
    num_rows = token_ids.shape[0]
    torch.where(is_token_ids[:, None], table[token_ids.long()], rows[:num_rows], out=out)
