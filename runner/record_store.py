"""What API processes keep in the runner so that each of them finds it: bytes with an id and an owner, in memory,
bounded, and gone when the runner ends. (They are the responses that clients can ask for again. Nothing here knows it.)

Used by the endpoint's receiving thread, and by no other.

A record is kept with the turns that it added to its conversation; those before it belong to the records before it. So a
long conversation is kept once, and a record that was deleted is gone from every conversation.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from runner.messages import MAX_RECORD_BYTES

MAX_RECORDS = 16384
MAX_BYTES = 256 << 20
SECONDS = 24 * 3600.0
"""Since a record was last used."""
ENTRY_BYTES = 1024
"""What a record takes beside its bytes, roughly."""

Data = bytes | memoryview


class NotKept(Exception):
    """No such record of this owner's, or no longer."""


class TooLarge(Exception):
    """More than is kept, or asked for, at once. `size`: bytes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size


@dataclass(frozen=True, slots=True)
class Record:
    body: Data
    turns: Data
    previous: str = ""
    """The id of the record before it in its conversation."""
    will: Data = b""
    """What the body becomes when `worker` dies. Empty: nothing."""
    worker: int = -1

    @property
    def largest(self) -> int:
        """Bytes of what can be asked for, now or then."""
        return max(len(self.body), len(self.will)) + len(self.turns)

    @property
    def size(self) -> int:
        return len(self.body) + len(self.turns) + len(self.will) + ENTRY_BYTES


@dataclass(slots=True)
class _Entry:
    record: Record
    used: float


class _Owned:
    """One owner's records, the one that was used longest ago first."""

    def __init__(self) -> None:
        self.entries: OrderedDict[str, _Entry] = OrderedDict()
        self.size = 0

    def put(self, record_id: str, entry: _Entry) -> None:
        if record_id in self.entries:
            self.pop(record_id)
        self.entries[record_id] = entry
        self.size += entry.record.size

    def pop(self, record_id: str) -> None:
        self.size -= self.entries.pop(record_id).record.size

    def drop_oldest(self) -> None:
        """Of those that are finished, while there are any: who has begun a response finds it when it ends."""
        finished = (record_id for record_id, entry in self.entries.items() if not entry.record.will)
        self.pop(next(finished, None) or next(iter(self.entries)))

    def expire(self, before: float) -> None:
        while self.entries:
            first = next(iter(self.entries))
            if self.entries[first].used >= before:
                return
            self.pop(first)


class RecordStore:
    """Where there is no room, the owner who takes most of it loses what it has not used for longest: a client can drive
    out its own records, not another's."""

    def __init__(
        self,
        *,
        max_records: int = MAX_RECORDS,
        max_bytes: int = MAX_BYTES,
        max_record_bytes: int = MAX_RECORD_BYTES,
        seconds: float = SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._owned: dict[int, _Owned] = {}
        """As many as the server has API keys, at most."""
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._max_record_bytes = max_record_bytes
        self._seconds = seconds
        self._clock = clock

    def __len__(self) -> int:
        return sum(len(each.entries) for each in self._owned.values())

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(each.size for each in self._owned.values())

    def put(self, owner: int, record_id: str, record: Record, *, replaces: bool = False) -> None:
        """`replaces`: only where there is one. Raises TooLarge, NotKept."""
        if replaces:
            self.get(owner, record_id)
        if record.largest > self._max_record_bytes or record.size > self._max_bytes:
            raise TooLarge(record.largest)
        now = self._clock()
        for each in self._owned.values():
            each.expire(now - self._seconds)
        self._owned.setdefault(owner, _Owned()).put(record_id, _Entry(record, now))
        while self.size > self._max_bytes:
            max(self._owned.values(), key=lambda each: each.size).drop_oldest()
        while len(self) > self._max_records:
            max(self._owned.values(), key=lambda each: len(each.entries)).drop_oldest()

    def get(self, owner: int, record_id: str) -> Record:
        """Raises NotKept."""
        owned, now = self._owned.get(owner), self._clock()
        if owned is None:
            raise NotKept
        owned.expire(now - self._seconds)
        entry = owned.entries.get(record_id)
        if entry is None:
            raise NotKept
        entry.used = now
        owned.entries.move_to_end(record_id)
        return entry.record

    def turns(self, owner: int, record_id: str, max_bytes: int) -> list[Data]:
        """Those of the record and of all before it, the first one's first. Raises NotKept unless all are there,
        TooLarge for more than `max_bytes`."""
        found: list[Data] = []
        size = 0
        while record_id:
            record = self.get(owner, record_id)
            found.append(record.turns)
            size += len(record.turns)
            if len(found) > self._max_records:
                break  # in circles
            record_id = record.previous
        if size > max_bytes or record_id:
            raise TooLarge(size)
        return found[::-1]

    def end_worker(self, worker: int) -> None:
        """Carries out the wills of a worker that has died."""
        for owned in self._owned.values():
            for record_id, entry in list(owned.entries.items()):
                if entry.record.will and entry.record.worker == worker:
                    left = Record(entry.record.will, entry.record.turns, entry.record.previous)
                    owned.put(record_id, _Entry(left, entry.used))

    def delete(self, owner: int, record_id: str) -> None:
        """Raises NotKept."""
        self.get(owner, record_id)
        self._owned[owner].pop(record_id)
