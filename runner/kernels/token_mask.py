"""Takes from the logits what a grammar forbids. Called by `runner.device_step` between forward and sampling."""

from __future__ import annotations

import torch
from torch import Tensor


def mask_logits(logits: Tensor, entries: Tensor, masks: Tensor) -> None:
    """Sets logits to -inf where the bit of their token is 0, in the rows named.

    Args:
        logits: [E, vocab] of any floating dtype, written.
        entries: [G] int32: the row of `logits` that each mask is for, no row twice.
        masks: [G, W] int32, W >= ceil(vocab / 32): bit t % 32 of word t // 32 is 1 where token t is allowed.
    """
    if logits.is_cuda:
        from runner.kernels.token_mask_triton import mask_logits_triton

        return mask_logits_triton(logits, entries, masks)
    return mask_logits_reference(logits, entries, masks)


def mask_logits_reference(logits: Tensor, entries: Tensor, masks: Tensor) -> None:
    bit = torch.arange(32, dtype=torch.int32, device=masks.device)
    allowed = (masks[:, :, None] >> bit & 1).flatten(1)[:, : logits.shape[1]].bool()
    rows = entries.long()
    logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)
