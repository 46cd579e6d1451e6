"""What one step computes: decided by the scheduler, done by `runner.device_step`, accounted for by the scheduler again
once its results are on the host."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from runner.sequence import Sequence


@dataclass(eq=False)
class Admission:
    """A sequence that was given a slot in this step: what the device must be told of it before."""

    sequence: Sequence
    computed: int
    """Rows found in the prefix cache."""
    blocks: NDArray[np.int32]
    at: float = field(default_factory=time.monotonic)
    """When, seconds of the monotonic clock."""


@dataclass(eq=False)
class PromptScore:
    """An entry some of whose rows predict prompt positions that want a log-probability."""

    entry: int
    first_row: int
    """Row of the step that predicts prompt position `start`."""
    start: int
    end: int
    top: int


@dataclass(eq=False)
class HiddenRun:
    """An entry some of whose rows' hidden states leave the device: prompt or answer positions start … end - 1."""

    entry: int
    first_row: int
    """Row of the step at position `start`."""
    start: int
    end: int
    summed: bool
    """Only their sum is wanted."""


@dataclass(eq=False)
class Step:
    """Entries are packed one behind the other, those with one row (decodes) first. E entries, T rows."""

    slots: NDArray[np.signedinteger]
    """[E]"""
    starts: NDArray[np.int32]
    """[E + 1]: first row of each entry; the last element is T."""
    computed: NDArray[np.int32]
    """[E]: rows in the cache once the step is done."""
    new_blocks: NDArray[np.int32]
    """[E]: the block that entry i's last row needs and its table lacks; 0 for none."""
    samples: NDArray[np.bool_]
    """[E]: entry i's next token is sampled."""
    asking: NDArray[np.bool_]
    """[E]: entry i samples and asks for more than a temperature (`SamplingParams.is_plain`)."""
    positions: NDArray[np.int32]
    """[E]: the position that the sampled token takes."""
    num_decodes: int
    prompt_rows: int
    """How many of the T rows are prompt rows."""
    sequences: list[Sequence]
    admissions: list[Admission]
    embedding_runs: list[tuple[int, NDArray[np.uint8]]] = field(default_factory=list)
    """(row of the step of the first, the rows' bytes) for every run of embedding rows."""
    position_runs: list[tuple[int, NDArray[np.int32]]] = field(default_factory=list)
    """(row of the step of the first, their position ids, [3, n]) for every run of prompt rows that has such."""
    prompt_scores: list[PromptScore] = field(default_factory=list)
    hidden_runs: list[HiddenRun] = field(default_factory=list)
    members: int = 0
    """Steps with the same number here have the same entries, in the same order; 0: nobody knows."""
    prompts: list[int] = field(default_factory=list)
    """Entries with rows that were known at their admission: of prompts, or from before a preemption."""
    closing: list[int] = field(default_factory=list)
    """Entries whose sequences have nothing left to launch: they end with this step, if not before."""
    latent_inputs: NDArray[np.intp] = field(default_factory=lambda: np.empty(0, np.intp))
    """Entries whose one row is the hidden state that the step before has left on the device."""
    latent_outputs: NDArray[np.intp] = field(default_factory=lambda: np.empty(0, np.intp))
    """Entries whose next row is this step's hidden state; the token that is sampled for them counts for nothing."""

    @property
    def num_entries(self) -> int:
        return len(self.slots)

    @property
    def num_rows(self) -> int:
        return int(self.starts[-1])
