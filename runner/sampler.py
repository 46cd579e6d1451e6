"""From logits to tokens: edits, penalties, temperature, filters, the choice, and log-probabilities.

Called by `runner.device_step`. Per-request parameters live on the device, by slot (`SamplingState`); every stage works
on the whole batch with neutral values where a request doesn't ask, and a stage that nobody in the step asks for is
skipped. The order is the one that users of other servers know: penalties, logit_bias and min_tokens on the logits, then
temperature, then min_p, top_k and top_p on the distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner.kernels.gumbel import gumbel_argmax
from runner.messages import SamplingParams
from runner.slots import SlotState

FLOAT_FIELDS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
INT_FIELDS = ("top_k", "choice", "seed_low", "seed_high")


@dataclass
class SamplingState:
    """Sampling parameters by slot, on the device. `floats` [6, S] float32 and `ints` [4, S] int32, a row
    a field (as named above), so that a gathered field is contiguous."""

    floats: Tensor
    ints: Tensor

    @staticmethod
    def allocate(num_slots: int, device: torch.device) -> SamplingState:
        return SamplingState(
            torch.zeros(len(FLOAT_FIELDS), num_slots, device=device),
            torch.zeros(len(INT_FIELDS), num_slots, dtype=torch.int32, device=device),
        )


def pack(params: SamplingParams, choice: int) -> NDArray[np.int32]:
    """[10] int32: one slot's row of `floats` (as bits) and of `ints`."""
    floats = np.array([params.temperature, params.top_p, params.min_p, params.presence_penalty,
                       params.frequency_penalty, params.repetition_penalty], np.float32)  # fmt: skip
    seed = np.array([params.seed], np.int64).view(np.int32)  # little-endian: low word first
    return np.concatenate([floats.view(np.int32), np.array([params.top_k, choice], np.int32), seed])


@dataclass(frozen=True)
class Asks:
    """What a request asks of the sampler beyond temperature; a step asks for what any of its entries does."""

    penalties: bool = False
    filters: bool = False

    @staticmethod
    def of(params: SamplingParams) -> Asks:
        penalised = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0.0, 0.0, 1.0)
        filtered = params.temperature > 0 and (params.top_p < 1 or params.top_k > 0 or params.min_p > 0)
        return Asks(penalised, filtered)

    def __or__(self, other: Asks) -> Asks:
        return Asks(self.penalties or other.penalties, self.filters or other.filters)


@dataclass
class LogitEdits:
    """Entry `entry`: adds `values` to the logits of `token_ids` (logit_bias; -inf for stop ids before min_tokens)."""

    entry: int
    token_ids: Tensor
    """[k] int64, device"""
    values: Tensor
    """[k] float32, device"""


def sample(logits: Tensor, slot: Tensor, slots: SlotState, sampling: SamplingState, asks: Asks,
           edits: list[LogitEdits], max_len: int) -> Tensor:  # fmt: skip
    """The next token of each entry.

    Args:
        logits: [E, vocab] float32; overwritten where something edits them.
        slot: [E] int64, device.
        max_len: no entry's sequence is longer.

    Returns:
        [E] int64, device.
    """
    temperature, top_p, min_p, presence, frequency, repetition = sampling.floats[:, slot].unbind(0)
    top_k, choice, seed_low, seed_high = sampling.ints[:, slot].unbind(0)
    if asks.penalties:
        logits = apply_penalties(logits, slot, slots, max_len, presence, frequency, repetition)
    for edit in edits:
        logits[edit.entry].index_add_(0, edit.token_ids, edit.values)
    if asks.filters:
        logits = apply_filters(logits, temperature, top_k, top_p, min_p)
    seed = (seed_high.long() << 32) | (seed_low.long() & 0xFFFFFFFF)
    return gumbel_argmax(logits, temperature, seed, choice, slots.length[slot].long())


def apply_penalties(logits: Tensor, slot: Tensor, slots: SlotState, max_len: int, presence: Tensor, frequency: Tensor,
                    repetition: Tensor) -> Tensor:  # fmt: skip
    """Presence and frequency count the answer (OpenAI's definition); repetition also the prompt's token rows (Keskar et
    al. 2019, arXiv:1909.05858). Embedding rows count for nothing: they have no id.

    The counts are made anew from the slots' ids in every step, so there is no state to go stale.
    """
    ids = slots.token_ids[slot, :max_len]
    place = torch.arange(ids.shape[1], device=ids.device)
    known = place < slots.length[slot, None]
    vocab = logits.shape[1]
    # What doesn't count is counted in a column of its own, which is dropped.
    seen = torch.where(known & (ids >= 0), ids, vocab).long()
    answered = torch.where(place >= slots.prompt_len[slot, None], seen, vocab)
    ones = torch.ones((), dtype=torch.int32, device=ids.device).expand_as(seen)

    def count(tokens: Tensor) -> Tensor:
        zeros = torch.zeros(len(logits), vocab + 1, dtype=torch.int32, device=ids.device)
        return zeros.scatter_add_(1, tokens, ones)[:, :vocab]

    answer = count(answered)
    factor = torch.where(count(seen) > 0, repetition[:, None], 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return logits - frequency[:, None] * answer - presence[:, None] * (answer > 0)


def apply_filters(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """-inf at tokens outside min_p (Nguyen et al. 2024, arXiv:2407.01082), top_k, then top_p (Holtzman et al. 2019,
    arXiv:1904.09751) of the distribution at the row's temperature. The most probable token always stays."""
    scaled = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    drop = ordered < ordered[:, :1] + torch.log(min_p)[:, None]
    drop |= (top_k[:, None] > 0) & (rank >= top_k[:, None])
    probs = ordered.masked_fill(drop, -torch.inf).softmax(-1)
    # A token stays while the mass before it is short of top_p, so the one that crosses the line stays too.
    drop |= (probs.cumsum(-1) - probs >= top_p[:, None]) & (top_p < 1)[:, None]
    drop[:, 0] = False
    return logits.masked_fill(torch.zeros_like(drop).scatter_(1, order, drop), -torch.inf)


@dataclass
class Logprobs:
    """Of N rows, with the k best tokens each; on the device until copied."""

    logprob: Tensor
    """[N] float32, of the token in question."""
    rank: Tensor
    """[N] int64, from 1."""
    top_tokens: Tensor
    """[N, k] int64, best first."""
    top_logprobs: Tensor
    """[N, k] float32"""


def logprobs_of(logits: Tensor, tokens: Tensor, top: int) -> Logprobs:
    """Log-softmax of the model's own logits ([N, vocab] float32) at `tokens` ([N] int64) and at the `top` best."""
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, tokens[:, None])
    rank = (logprobs > chosen).sum(-1) + 1
    best, best_tokens = logprobs.topk(top, dim=-1)
    return Logprobs(chosen[:, 0], rank, best_tokens, best)
