"""What a step produced, by the worker that it goes to: one message each. Made and emptied by the engine at every
retirement; `Addresses` outlives a step as long as the same sequences go on."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runner.messages import StepOutput, TokenLogprobs
from runner.slot_table import SlotTable


class _Share(NamedTuple):
    """One worker's part of a step's tokens."""

    worker: int
    start: int
    end: int
    """Its places in `_Shares.order`."""
    requests: list[int]
    choices: list[int]


class _Shares(NamedTuple):
    order: NDArray[np.intp]
    """[n]: entries, each worker's together."""
    shares: list[_Share]


class Addresses:
    """Whom the tokens of a step's entries go to. Read from the slots before the step is accounted for: they may be
    given to others then."""

    def __init__(self, table: SlotTable, slots: NDArray[np.signedinteger]) -> None:
        """`slots`: [E]"""
        self._workers, self._requests, self._choices = table.worker[slots], table.request[slots], table.choice[slots]
        self._all: _Shares | None = None

    def of(self, entries: NDArray[np.intp]) -> _Shares:
        """`entries`: [n], ascending."""
        if len(entries) < len(self._workers):
            return self._divide(entries)
        if self._all is None:
            self._all = self._divide(entries)
        return self._all

    def _divide(self, entries: NDArray[np.intp]) -> _Shares:
        workers = self._workers[entries]
        places = workers.argsort(kind="stable")
        order, workers = entries[places], workers[places]
        starts = [0, *((workers[1:] != workers[:-1]).nonzero()[0] + 1).tolist(), len(order)]
        requests, choices = self._requests[order].tolist(), self._choices[order].tolist()
        shares = [
            _Share(int(workers[start]), start, end, requests[start:end], choices[start:end])
            for start, end in pairwise(starts)
            if start < end
        ]
        return _Shares(order, shares)


class Outbox:
    def __init__(self) -> None:
        self._outputs: dict[int, StepOutput] = {}

    def of(self, worker: int) -> StepOutput:
        """What it will be sent, to be added to."""
        output = self._outputs.get(worker)
        if output is None:
            output = self._outputs[worker] = StepOutput([], [], [])
        return output

    def add_tokens(
        self, shares: _Shares, tokens: NDArray[np.int64], logprobs: dict[int, TokenLogprobs] | None = None
    ) -> None:
        """tokens: [E]. logprobs: by entry, of those that want any; None: nobody does."""
        values = tokens[shares.order].tolist()
        for share in shares.shares:
            output = self.of(share.worker)
            output.requests.extend(share.requests)
            output.choices.extend(share.choices)
            output.tokens.extend(values[share.start : share.end])
            if logprobs:
                output.logprobs.extend(map(logprobs.get, shares.order[share.start : share.end].tolist()))

    def send(self, emit: Callable[[int, StepOutput], None]) -> None:
        for worker, output in self._outputs.items():
            emit(worker, output)
