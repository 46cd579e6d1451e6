"""From logits to tokens: penalties, edits, temperature, filters and the choice.

Called by `runner.device_step`. Per-request parameters live on the device, by slot (`SamplingState`), and every kernel
reads them there; a stage that nobody in the step asks for is skipped, and within a stage only rows that ask do work.
The order is the one that users of other servers know: penalties, logit_bias, min_tokens and bans on the logits, then
temperature, then min_p, top_k and top_p on the distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from runner.kernels.filters import filter_floors
from runner.kernels.gumbel import gumbel_argmax
from runner.kernels.logprobs import Logprobs, logprobs_of
from runner.kernels.penalties import apply_penalties
from runner.messages import SamplingParams
from runner.sampling_state import SamplingState, pack
from runner.slots import SlotState
from runner.token_bans import BanEdit

__all__ = ["Asks", "LogitEdits", "Logprobs", "SamplingState", "logprobs_of", "pack", "sample"]


@dataclass(frozen=True)
class Asks:
    """What a request asks of the sampler beyond temperature; a step asks for what any of its entries does."""

    penalties: bool = False
    filters: bool = False

    @staticmethod
    def of(params: SamplingParams) -> Asks:
        return Asks(params.penalises, params.filters)


@dataclass
class LogitEdits:
    """Single logits of a step, all of its entries' together (logit_bias; -inf for stop ids before min_tokens)."""

    places: Tensor
    """[k] int64, device: entry * vocab + token id."""
    values: Tensor
    """[k] float32, device: what is added."""
    bans: tuple[BanEdit, ...] = ()
    """Of the entries that have any; applied after the rest."""

    def apply(self, logits: Tensor, slot: Tensor, slots: SlotState) -> None:
        """logits: [E, vocab] float32, contiguous. slot: [E], device."""
        logits.view(-1).index_add_(0, self.places, self.values)
        for ban in self.bans:
            ban.apply(logits, slot, slots)


def sample(logits: Tensor, slot: Tensor, slots: SlotState, sampling: SamplingState, asks: Asks,
           edits: LogitEdits | None, out: Tensor | None = None) -> Tensor:  # fmt: skip
    """The next token of each entry. Which kernels run, and how, depends on `asks`, `edits` and shapes alone, so a CUDA
    graph can hold it: one for each `asks`, without edits. Asks that nobody makes cost a launch and change nothing.

    Args:
        logits: [E, vocab], contiguous, any float dtype. Float32 ones are overwritten where a penalty or an edit changes
            them; others are then copied to float32 first, and stay.
        slot: [E] int32 or int64, device. Padding may have any slot (0), and gets any token.
        out: [>= E] int64, device; None for a new one.

    Returns:
        [E] int64, device; `out[:E]` where that is given.
    """
    if asks.penalties or edits is not None:
        logits = logits.float()
    if asks.penalties:
        apply_penalties(logits, slot, slots, sampling)
    if edits is not None:
        edits.apply(logits, slot, slots)
    floors = filter_floors(logits, slot, sampling) if asks.filters else None
    return gumbel_argmax(logits, slot, sampling, slots.length, floors, out)
