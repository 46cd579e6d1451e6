"""Presence, frequency and repetition penalties.

Called by `runner.sampler` for steps in which somebody is penalised. The counts are made anew from the slots' ids in
every step, so there is no state to go stale. Presence and frequency count the answer (OpenAI's definition); repetition
also the prompt's token rows (Keskar et al. 2019, arXiv:1909.05858). Embedding rows count for nothing, unless a hint
says which token they stand for (`runner.hints`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from runner.hints import counted_ids
from runner.sampling_state import SamplingState
from runner.slots import SlotState


def apply_penalties(logits: Tensor, slot: Tensor, slots: SlotState, sampling: SamplingState) -> None:
    """Changes the logits in place. Rows that don't ask for a penalty do no work.

    Args:
        logits: [N, vocab] float32.
        slot: [N] int32 or int64: the slot of row i, for its parameters, its ids and its lengths.
    """
    if logits.dtype != torch.float32:
        raise ValueError(f"penalties would be rounded away in {logits.dtype} logits")
    if logits.is_cuda:
        from runner.kernels.penalties_triton import apply_penalties_triton

        apply_penalties_triton(logits, slot, slots, sampling)
    else:
        apply_penalties_reference(logits, slot, slots, sampling)


def apply_penalties_reference(logits: Tensor, slot: Tensor, slots: SlotState, sampling: SamplingState) -> None:
    penalties = sampling.floats[3:6, slot.long()].T.tolist()
    for row, (presence, frequency, repetition), index in zip(logits, penalties, slot.tolist(), strict=True):
        if (presence, frequency, repetition) == (0.0, 0.0, 1.0):
            continue
        ids = counted_ids(slots.token_ids[index, : slots.length[index]])
        is_token = ids >= 0
        is_answer = torch.arange(len(ids), device=ids.device) >= slots.prompt_len[index]
        tokens = ids[is_token].bincount().nonzero()[:, 0]
        times, logit = ids[is_token & is_answer].bincount(minlength=len(row))[tokens], row[tokens]
        logit = torch.where(logit > 0, logit / repetition, logit * repetition)
        row[tokens] = logit - frequency * times - presence * (times > 0)
