"""The sequences that wait for a slot, and whose turn it is. Part of the scheduler.

Lower priorities go first; among equal ones the preempted, then the others in fair order: the *client* (one API key of
the server's) that has been served the least goes next, and each client's own requests go as they arrived. Served are
rows: those of a prompt that have to be computed, when it gets its slot, and every token made. So a client's thousand
queued requests make another one wait for no more than the slots that are taken, and long requests weigh what they cost.

A client that comes back after a pause is put level with the least served of those that are busy: nobody saves up turns.
(Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, call these virtual token counters.) With one
client this is first come, first served.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as List

import numpy as np
from numpy.typing import NDArray

from runner.sequence import Sequence

_Queue = OrderedDict[Sequence, None]
"""Whichever sequence goes, it goes in O(1)."""


class _Level:
    """Sequences of one priority."""

    def __init__(self) -> None:
        self.preempted: _Queue = OrderedDict()
        self.clients: dict[int, _Queue] = {}
        """Those clients that have any."""

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.preempted
        for queue in self.clients.values():
            yield from queue


class FairQueue:
    def __init__(self, num_clients: int = 1) -> None:
        self.rows = 0
        """Known rows of those that wait."""
        self._levels: dict[int, _Level] = {}
        self._priorities: list[int] = []
        """Of the levels, in order."""
        self._served: NDArray[np.int64] = np.zeros(num_clients, np.int64)
        """[clients]"""
        self._open = [0] * num_clients
        """Sequences of each client that wait or run."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        """By priority, the preempted first; not in the order of clients."""
        for priority in self._priorities:
            yield from self._levels[priority]

    # --- what happens to sequences ----------------------------------------------------------------------------------

    def add(self, sequences: List[Sequence]) -> None:
        """A new request's."""
        request = sequences[0].request
        if not self._open[request.client]:
            self._catch_up(request.client)
        self._open[request.client] += len(sequences)
        queue = self._level(request.priority).clients.setdefault(request.client, OrderedDict())
        queue.update(dict.fromkeys(sequences))
        self._count += len(sequences)
        self.rows += sum(len(sequence.token_ids) for sequence in sequences)

    def put_back(self, sequence: Sequence) -> None:
        """One that was preempted: it goes before its equals."""
        preempted = self._level(sequence.request.priority).preempted
        preempted[sequence] = None
        preempted.move_to_end(sequence, last=False)
        self._count += 1
        self.rows += len(sequence.token_ids)

    def remove(self, sequence: Sequence) -> None:
        """It has a slot now, or has ended."""
        request = sequence.request
        level = self._levels[request.priority]
        if sequence in level.preempted:
            del level.preempted[sequence]
        else:
            queue = level.clients[request.client]
            del queue[sequence]
            if not queue:
                del level.clients[request.client]
        if not level.preempted and not level.clients:
            del self._levels[request.priority]
            self._priorities.remove(request.priority)
        self._count -= 1
        self.rows -= len(sequence.token_ids)

    def ended(self, sequence: Sequence) -> None:
        """It neither waits nor runs any more."""
        self._open[sequence.request.client] -= 1

    # --- whose turn it is -------------------------------------------------------------------------------------------

    def first(self) -> Sequence | None:
        """The next to get a slot, if any can (a choice may have to wait for the one that computes its prompt)."""
        for priority in self._priorities:
            level = self._levels[priority]
            clients = level.clients
            order = clients if len(clients) < 2 else sorted(clients, key=self._turn)
            for queue in (level.preempted, *(clients[client] for client in order)):
                sequence = next((each for each in queue if each.waits_for is None), None)
                if sequence is not None:
                    return sequence
        return None

    def charge(self, client: int, rows: int) -> None:
        self._served[client] += rows

    def charge_tokens(self, clients: NDArray[np.int32]) -> None:
        """One token for each entry. [entries]: whose it is."""
        if len(self._served) > 1:
            self._served += np.bincount(clients, minlength=len(self._served))

    def _turn(self, client: int) -> int:
        return int(self._served[client])

    def _catch_up(self, client: int) -> None:
        busy = [served for served, count in zip(self._served.tolist(), self._open, strict=True) if count]
        level = min(busy) if busy else int(self._served.max())
        self._served[client] = max(int(self._served[client]), level)

    def _level(self, priority: int) -> _Level:
        if priority not in self._levels:
            self._levels[priority] = _Level()
            insort(self._priorities, priority)
        return self._levels[priority]
