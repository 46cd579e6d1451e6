"""Tokens that a request rules out: `allowed_token_ids` and `bad_words`.

Built by `device_step`, once a request; applied by `sampler.sample` to the logits, behind logit_bias. All of it happens
on the device: whether a bad word of several tokens is about to be completed follows from the ids in the slot, some of
which the host has not seen yet when it launches the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runner.messages import SamplingParams
from runner.slots import SlotState

_ANY = -2
"""Left of a bad word that is shorter than the longest one: equal to whatever stands there."""
_PROMPT = -3
"""Stands for the prompt's rows: only the answer can contain a bad word."""


@dataclass(frozen=True, eq=False)
class TokenBans:
    """One request's, on the device."""

    allowed: Tensor | None
    """[k] int64; None where every token is allowed."""
    last: Tensor
    """[W] int64: the last token of each bad word."""
    before: Tensor
    """[W, L] int64: the tokens in front of it, aligned right, `_ANY` to their left."""

    @staticmethod
    def of(params: SamplingParams, to_device: Callable[[Tensor], Tensor]) -> TokenBans:
        allowed = to_device(torch.tensor(params.allowed_token_ids)) if params.allowed_token_ids else None
        last, before = _words(params.bad_words)
        return TokenBans(allowed, to_device(last), to_device(before))

    def apply(self, row: Tensor, token_ids: Tensor, length: Tensor, prompt_len: Tensor) -> None:
        """Writes -inf where a token is ruled out.

        Args:
            row: [vocab] float32. token_ids: [max_model_len] int32, the slot's. length, prompt_len: [] int32.
        """
        if self.allowed is not None:
            kept = row[self.allowed]
            row.fill_(-torch.inf)
            row[self.allowed] = kept
        if len(self.last):
            place = length + torch.arange(-self.before.shape[1], 0, device=row.device)
            ids = torch.where(place >= prompt_len, token_ids[place.clamp(min=0).long()].long(), _PROMPT)
            complete = ((self.before == ids) | (self.before == _ANY)).all(1)
            ruled = row.index_add(0, self.last, torch.where(complete, -torch.inf, 0.0))
            # Where a bad word is all that is allowed there has to be a token nonetheless.
            row.copy_(torch.where(ruled.isneginf().all(), row, ruled))


@dataclass(frozen=True, eq=False)
class BanEdit:
    """`bans` for the step's entry `entry`; part of `sampler.LogitEdits`."""

    entry: int
    bans: TokenBans

    def apply(self, logits: Tensor, slot: Tensor, slots: SlotState) -> None:
        """logits: [E, vocab] float32. slot: [E] int32 or int64, device."""
        # By a tensor of one element: one of none would be fetched to the host, which would wait for the whole forward.
        own = slot[self.entry : self.entry + 1]
        ids, length, prompt_len = (
            field.index_select(0, own)[0] for field in (slots.token_ids, slots.length, slots.prompt_len)
        )
        self.bans.apply(logits[self.entry], ids, length, prompt_len)


def _words(words: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    longest = max(map(len, words), default=1) - 1
    before = [[_ANY] * (longest - len(word) + 1) + list(word[:-1]) for word in words]
    last = torch.tensor([word[-1] for word in words], dtype=torch.int64)
    return last, torch.tensor(before, dtype=torch.int64).reshape(len(words), longest)
