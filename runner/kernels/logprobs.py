"""Log-probabilities: of one token in each row, its rank, and the best tokens beside it.

Called by `runner.device_step`, for what was sampled and for prompts that are scored. All in float32, whatever the
logits' dtype, and no [N, vocab] tensor of log-probabilities ever exists.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Logprobs:
    """Of N rows, with the k best tokens each; on the device until copied."""

    logprob: Tensor
    """[N] float32, of the token in question."""
    rank: Tensor
    """[N] int64, from 1: one more than there are tokens with a higher logit."""
    top_tokens: Tensor
    """[N, k] int64, best first; of equal logits the lowest ids."""
    top_logprobs: Tensor
    """[N, k] float32"""


def logprobs_of(logits: Tensor, tokens: Tensor, top: int) -> Logprobs:
    """Log-softmax of the model's own logits at `tokens` and at the `top` best.

    Args:
        logits: [N, vocab], any float dtype. tokens: [N] int64.
        top: at most vocab; on CUDA at most 64 (a server's limit is 20).
    """
    if logits.is_cuda:
        from runner.kernels.logprobs_triton import logprobs_of_triton

        return logprobs_of_triton(logits, tokens, top)
    return logprobs_of_reference(logits, tokens, top)


def logprobs_of_reference(logits: Tensor, tokens: Tensor, top: int) -> Logprobs:
    logits = logits.float()
    peak = logits.amax(-1, keepdim=True)
    total = peak + (logits - peak).exp_().sum(-1, keepdim=True).log()
    chosen = logits.gather(1, tokens[:, None])
    best, best_tokens = _top(logits, top)
    return Logprobs((chosen - total)[:, 0], _count(logits > chosen) + 1, best_tokens, best - total)


def _top(logits: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """`topk`, but of equal logits the lowest ids, in their order: torch leaves that open."""
    best, tokens = logits.topk(top, dim=-1)
    if top == 0:
        return best, tokens
    worst = best[:, -1:]
    for row in (_count(logits >= worst) > top).nonzero()[:, 0].tolist():
        ties = best[row] == worst[row]
        tokens[row, ties] = (logits[row] == worst[row]).nonzero()[: int(ties.sum()), 0]
    tokens, order = tokens.sort(dim=-1)
    best, by_logit = best.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return best, tokens.gather(1, by_logit)


def _count(flags: Tensor) -> Tensor:
    """[N, vocab] bool to [N] int64. A sum over bool takes twice as long."""
    return flags.view(torch.uint8).sum(-1, dtype=torch.int32).long()
