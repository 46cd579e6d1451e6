"""A device without a model, for the scheduler's tests: it keeps what the real one keeps, in plain Python, and checks
everything that a schedule must not get wrong.

A cached row is the identity of all rows up to it, so that a block which holds anybody else's row, or the right rows at
another place, is told at once. The "model" says a token that follows from this identity: answers can be predicted
without it.
"""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from runner.scheduler import Scheduler
from runner.sequence import Request, Sequence
from runner.step import Step

VOCAB_SIZE = 7

Identity = int
"""Of a row and all that stand before it."""


def identity(before: Identity, row: int | bytes) -> Identity:
    """`row`: a token id, or an embedding's bytes. The same in every process, unlike `hash`."""
    return zlib.crc32(repr(row).encode(), before)


def say(prompt: Identity) -> int:
    """The token that the model says after these rows."""
    return prompt % VOCAB_SIZE


def answer(rows: list[int | bytes], count: int) -> list[int]:
    """What the model says to a prompt."""
    tokens: list[int] = []
    at: Identity = 0
    for row in rows:
        at = identity(at, row)
    for _ in range(count):
        tokens.append(say(at))
        at = identity(at, tokens[-1])
    return tokens


@dataclass
class _Slot:
    rows: list[int | bytes]
    """What the request says they are, and then what was sampled."""
    blocks: list[int]
    computed: int

    def identities(self) -> list[Identity]:
        return list(itertools.accumulate(self.rows, identity, initial=0))[1:]


@dataclass
class Launched:
    """A step, with copies of everything that the host may change before it runs."""

    step: Step
    admitted: list[tuple[int, _Slot]]
    embeddings: dict[int, bytes]


@dataclass
class ToyDevice:
    """Runs launched steps in order, when told to."""

    block_size: int
    slots: dict[int, _Slot] = field(default_factory=dict)
    cache: dict[tuple[int, int], Identity] = field(default_factory=dict)
    """(block, place in it) to what is there."""

    def launch(self, step: Step) -> Launched:
        admitted = [
            (a.sequence.slot, _Slot(_rows_of(a.sequence), a.blocks.tolist(), a.computed)) for a in step.admissions
        ]
        embeddings = {first + i: row.tobytes() for first, rows in step.embedding_runs for i, row in enumerate(rows)}
        return Launched(step, admitted, embeddings)

    def run(self, launched: Launched) -> NDArray[np.int64]:
        """The token of each entry; of those that sample nothing, one that does not exist."""
        for number, slot in launched.admitted:
            self.slots[number] = slot
        step = launched.step
        assert len(set(step.slots.tolist())) == step.num_entries
        for entry in range(step.num_entries):
            slot = self.slots[int(step.slots[entry])]
            first, end = step.starts[entry : entry + 2].tolist()
            assert (end - first == 1) if entry < step.num_decodes else (end - first > 1)
            if step.new_blocks[entry]:
                slot.blocks.append(int(step.new_blocks[entry]))
            self._write(slot, [launched.embeddings.get(row) for row in range(first, end)])
            assert slot.computed == step.computed[entry]
        # As in a layer of the real one: every row is written before any is read.
        return np.array([self._sample(step, entry) for entry in range(step.num_entries)], np.int64)

    def _write(self, slot: _Slot, embeddings: list[bytes | None]) -> None:
        identities = slot.identities()
        for embedding in embeddings:
            row = slot.rows[slot.computed]
            assert embedding == (row if isinstance(row, bytes) else None), "another row's embedding"
            self.cache[self._place(slot, slot.computed)] = identities[slot.computed]
            slot.computed += 1

    def _sample(self, step: Step, entry: int) -> int:
        slot = self.slots[int(step.slots[entry])]
        identities = slot.identities()
        for position in range(slot.computed):
            assert self.cache[self._place(slot, position)] == identities[position], "another sequence's row"
        if not step.samples[entry]:
            return -(10**9)
        assert step.positions[entry] == len(slot.rows) == slot.computed
        slot.rows.append(say(identities[-1]))
        return say(identities[-1])

    def _place(self, slot: _Slot, position: int) -> tuple[int, int]:
        block = slot.blocks[position // self.block_size]
        assert block > 0, "the dummy"
        return block, position % self.block_size


def _rows_of(sequence: Sequence) -> list[int | bytes]:
    rows: list[int | bytes] = sequence.token_ids.tolist()
    for span, embeddings in zip(sequence.request.spans, sequence.request.rows, strict=True):
        rows[span.start : span.start + span.length] = [row.tobytes() for row in embeddings]
    return rows


class ToyEngine:
    """A scheduler, a toy device, and the loop between them: `runner.engine` without everything else."""

    def __init__(self, *, block_size: int = 4, overlap: bool = False, **limits: int) -> None:
        settings = {
            "num_slots": 4,
            "num_blocks": 33,
            "max_model_len": 32,
            "max_num_batched_tokens": 16,
            "max_admitted_rows": 48,
            **limits,
        }
        self.scheduler = Scheduler(block_size=block_size, **settings)
        self.device = ToyDevice(block_size)
        self.depth = int(overlap)
        self.launched: list[Launched] = []
        self.tokens: dict[tuple[int, int], list[int]] = {}
        """By (request, choice), as they are sent."""
        self.ends: dict[tuple[int, int], str] = {}
        self.scored: dict[int, list[int]] = {}
        """By request: the prompt positions that got a log-probability."""
        self.aborted: set[tuple[int, int]] = set()

    def add(self, request: Request) -> None:
        self.scheduler.add(request)

    def abort(self, number: int, choice: int = -1) -> None:
        key = (0, number)
        self.aborted |= {(number, s.choice) for s in self.scheduler.requests.get(key, ()) if choice in (-1, s.choice)}
        self.scheduler.abort(key, choice)

    def schedule(self) -> Step | None:
        step = self.scheduler.schedule()
        if step is not None:
            assert 0 < step.num_rows <= self.scheduler.budget
            self.launched.append(self.device.launch(step))
        return step

    def retire(self) -> None:
        launched = self.launched.pop(0)
        step = launched.step
        for score in step.prompt_scores:
            sequence = step.sequences[score.entry]
            self.scored.setdefault(sequence.request.key[1], []).extend(range(score.start, score.end))
        tokens = self.device.run(launched)
        entries, ended = self.scheduler.retire(step, tokens)
        for entry in entries.tolist():
            sequence = step.sequences[entry]
            key = (sequence.request.key[1], sequence.choice)
            assert key not in self.ends and key not in self.aborted
            self.tokens.setdefault(key, []).append(int(tokens[entry]))
        for end in ended:
            key = (end.sequence.request.key[1], end.sequence.choice)
            assert key not in self.ends and key not in self.aborted
            self.ends[key] = end.reason
            if end.reason == "stop":
                assert end.stop_token == self.tokens[key][-1]

    def step(self) -> None:
        step = self.schedule()
        if self.launched and (step is None or len(self.launched) > self.depth):
            self.retire()
        self.check()

    def run(self) -> None:
        for _ in range(3000):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("never done")

    def check(self) -> None:
        """What must hold between any two steps."""
        scheduler, table = self.scheduler, self.scheduler.table
        running = [(slot, s) for slot, s in enumerate(table.sequences) if s is not None]
        assert all(s.slot == slot for slot, s in running)
        assert sorted([slot for slot, _ in running] + table.free) == list(range(len(table.sequences)))
        held = [table.blocks[slot, : table.num_blocks[slot]].tolist() for slot, _ in running]
        assert scheduler.pool.num_used == len({block for blocks in held for block in blocks})
        assert scheduler.num_in_flight == len(self.launched) <= 1

    def assert_empty(self) -> None:
        scheduler = self.scheduler
        assert not scheduler.has_work and not scheduler.waiting
        assert scheduler.pool.num_used == scheduler.num_running == 0
