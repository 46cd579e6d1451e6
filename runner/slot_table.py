"""The scheduler's own arrays, indexed by slot: the host's side of `slots.SlotState`.

Used by `runner.scheduler`, in every step, for all slots of the step at once: a field of many slots is one gather. Read
by the engine, which must know whom a step's tokens go to.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runner.hidden import NO_POSITION
from runner.sequence import Sequence


class SlotTable:
    def __init__(self, num_slots: int, max_model_len: int, block_size: int) -> None:
        blocks_per_seq = -(-max_model_len // block_size)
        self.sequences: list[Sequence | None] = [None] * num_slots
        self.token_ids: NDArray[np.int32] = np.zeros((num_slots, max_model_len), np.int32)
        self.blocks: NDArray[np.int32] = np.zeros((num_slots, blocks_per_seq), np.int32)
        self.num_blocks: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        self.length: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        self.computed: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        self.known: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        """Rows whose token ids have arrived: `length` less what is in flight."""
        self.prompt_len: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        self.answer_start: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        """`Request.answer_start`: behind the prompt, and behind its latent steps."""
        self.admitted: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        """Rows known at the admission. Later ones are known to the device first."""
        self.limit: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        self.published: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        """Blocks offered to the prefix cache."""
        self.admission: NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self.worker: NDArray[np.int64] = np.zeros(num_slots, np.int64)
        """Whom its tokens go to, with `request` and `choice`."""
        self.request: NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self.choice: NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self.client: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        self.launched: NDArray[np.int64] = np.zeros(num_slots, np.int64)
        """The number of the last launched step that reads the slot and its blocks."""
        self.ended: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        """Its sequence has ended; the slot is kept for steps in flight only."""
        self.open: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        """Has rows left to launch."""
        self.asks: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        """Its sampling asks for more than a temperature."""
        self.hidden_from: NDArray[np.int32] = np.full(num_slots, NO_POSITION, np.int32)
        """`Sequence.hidden_from`."""
        self.stop_ids: NDArray[np.int32] = np.full((4, num_slots), -1, np.int32)
        """A column a slot; -1 where it has fewer than others."""
        self.num_stop_ids: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        self._most_stop_ids = 0
        """Of any slot: a long list costs the others nothing any more once its sequence has gone."""
        self.free = list(range(num_slots - 1, -1, -1))

    def set_stop_ids(self, slot: int, stop_ids: tuple[int, ...]) -> None:
        if len(stop_ids) > len(self.stop_ids):
            grown = np.full((len(stop_ids), len(self.sequences)), -1, np.int32)
            grown[: len(self.stop_ids)] = self.stop_ids
            self.stop_ids = grown
        self.stop_ids[:, slot] = -1
        self.stop_ids[: len(stop_ids), slot] = stop_ids
        self.num_stop_ids[slot] = len(stop_ids)
        self._most_stop_ids = int(self.num_stop_ids.max())

    def sequences_of(self, slots: NDArray[np.intp]) -> list[Sequence]:
        """Of slots that have one."""
        return list(map(self.sequences.__getitem__, slots.tolist()))  # type: ignore[arg-type]

    def stopping(self, slots: NDArray[np.signedinteger], token_ids: NDArray[np.int64]) -> NDArray[np.intp]:
        """Places among `slots` ([n]) whose new token ([n]) is one that ends its sequence."""
        if not self._most_stop_ids:
            return _NOWHERE
        hits = self.stop_ids[: self._most_stop_ids, slots] == token_ids
        return hits.any(0).nonzero()[0] if np.count_nonzero(hits) else _NOWHERE


_NOWHERE = np.zeros(0, np.intp)
