"""Embeddings that clients have stored, so that their prompts name them instead of sending them: in the runner's host
memory, where every API process finds them, and gone when the runner ends.

Used by the endpoint: its receiving thread puts, finds, lists and deletes, and leases the rows of a request that names
any; the lease is given back on the engine's thread, when the request ends. So there is a lock, held for microseconds.

An id is made from its owner and from the rows' own sha256: the same rows of the same owner are one entry, and nobody
can find out what another owner has. Memory is bounded three times, each time at the cost of what was used longest ago
and is not in use: per owner in bytes and in number, and over all in bytes. What is in use stays until its users have
ended, deleted or not, and counts as long.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256 as _sha256
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from runner.messages import DIGEST_BYTES, StoredInfo

ENTRY_BYTES = 2048
"""What an entry takes beside its rows and digests, roughly. Counted, so that a million small ones are not for free."""
MAX_ENTRIES = 10_000
"""Of one owner. A page of a list walks over them, on the thread that receives everybody's messages."""


class StoreError(Exception):
    """Rows that cannot be kept."""


class TooLarge(StoreError):
    """They would not fit into an empty store."""


class StoreFull(StoreError):
    """They would not fit beside what is in use now."""


class NotStored(StoreError):
    """No such embedding, or no longer."""


@dataclass(eq=False)
class StoredRows:
    id: str
    owner: int
    sha256: str
    rows: NDArray[np.uint8]
    """[num_rows, hidden_size * itemsize]: bytes in the model's dtype, in the message's own memory. Never written to."""
    digests: bytes = field(repr=False)
    """[num_rows, DIGEST_BYTES]."""
    created_at: float
    """Seconds since 1970, as is `expires_at`: what clients are told."""
    expires_at: float
    kept_until: float
    """Seconds of the monotonic clock, which no correction of the time moves: when it is dropped."""
    users: int = 0
    """Leases that have not been given back."""

    @property
    def size(self) -> int:
        return self.rows.nbytes + len(self.digests) + ENTRY_BYTES

    def info(self) -> StoredInfo:
        return StoredInfo(self.id, len(self.rows), self.sha256, int(self.created_at), int(self.expires_at))


class _Owned:
    """One owner's entries. `idle`: those nobody uses, the one used longest ago first."""

    def __init__(self) -> None:
        self.entries: dict[str, StoredRows] = {}
        self.idle: OrderedDict[str, StoredRows] = OrderedDict()
        self.size = 0


class EmbeddingStore:
    """`max_bytes`: of all entries together; `max_owner_bytes`: of one owner's; `seconds`: how long an entry is kept
    after it was last put. `clock`: monotonic; `wall_clock`: seconds since 1970."""

    def __init__(
        self,
        max_bytes: int,
        max_owner_bytes: int,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_owner_bytes = min(max_owner_bytes, max_bytes)
        self._seconds = seconds
        self._clock, self._wall_clock = clock, wall_clock
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, StoredRows] = OrderedDict()
        """What can be found, the one that is dropped first first."""
        self._idle: OrderedDict[str, StoredRows] = OrderedDict()
        """Over all owners."""
        self._owners: dict[int, _Owned] = {}
        """As many as the server has API keys, at most."""
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        """Bytes, what was deleted and is still in use included."""
        return self._bytes

    # --- for the routes ---------------------------------------------------------------------------------------------

    def put(self, owner: int, sha256: str, rows: NDArray[np.uint8], digests: bytes) -> StoredInfo:
        """Keeps the rows; those of an entry that is there already are dropped, and it gets its time again.

        Args:
            rows: [num_rows, row bytes]. digests: [num_rows, DIGEST_BYTES].

        Raises:
            TooLarge, StoreFull: nothing was changed but that others may have made room.
        """
        if not len(rows) or len(digests) != len(rows) * DIGEST_BYTES:
            raise ValueError("there must be a digest for every row")
        now, created = self._clock(), self._wall_clock()
        expires, until = created + self._seconds, now + self._seconds
        entry = StoredRows(_id(owner, sha256), owner, sha256, rows, digests, created, expires, until)
        with self._lock:
            self._expire(now)
            known = self._entries.get(entry.id)
            if known is not None:
                known.expires_at, known.kept_until = entry.expires_at, entry.kept_until
                self._entries.move_to_end(known.id)
                self._touch(known)
                return known.info()
            owned = self._owners.setdefault(owner, _Owned())
            self._make_room(entry.size, owned)
            self._entries[entry.id] = owned.entries[entry.id] = entry
            self._bytes += entry.size
            owned.size += entry.size
            self._set_idle(entry)
            return entry.info()

    def find(self, owner: int, ids: Iterable[str]) -> list[StoredInfo]:
        """Those of `ids` that this owner has. They were used now."""
        with self._lock:
            self._expire(self._clock())
            owned = self._owners.get(owner)
            found = [entry for each in ids if owned is not None and (entry := owned.entries.get(each)) is not None]
            for entry in found:
                self._touch(entry)
            return [entry.info() for entry in found]

    def list(
        self, owner: int, after: str, limit: int, *, newest_first: bool = True
    ) -> tuple[Sequence[StoredInfo], bool]:
        """A page, and whether there is more behind it. In the order in which they were first put; not a use of them.

        Raises:
            NotStored: there is no `after`.
        """
        with self._lock:
            self._expire(self._clock())
            entries = self._owners[owner].entries if owner in self._owners else {}
            if after and after not in entries:
                raise NotStored
            order = iter(reversed(entries)) if newest_first else iter(entries)
            if after:
                for each in order:
                    if each == after:
                        break
            page = list(islice(order, limit + 1))
            return [entries[each].info() for each in page[:limit]], len(page) > limit

    def delete(self, owner: int, id: str) -> StoredInfo:
        """Raises NotStored."""
        with self._lock:
            self._expire(self._clock())
            entry = self._owners[owner].entries.get(id) if owner in self._owners else None
            if entry is None:
                raise NotStored
            self._remove(entry)
            return entry.info()

    # --- for requests -----------------------------------------------------------------------------------------------

    def lease(self, ids: Iterable[str]) -> tuple[StoredRows, ...]:
        """The entries of these ids, which stay until `give_back`. (That they are the client's own was found before:
        an id is an owner's.) Raises NotStored, and then leases nothing."""
        with self._lock:
            self._expire(self._clock())
            found = tuple(self._entries.get(each) for each in ids)
            leased = tuple(entry for entry in found if entry is not None)
            if len(leased) < len(found):
                raise NotStored
            for entry in leased:
                entry.users += 1
                self._idle.pop(entry.id, None)
                self._owners[entry.owner].idle.pop(entry.id, None)
            return leased

    def give_back(self, leased: Iterable[StoredRows]) -> None:
        """Once for each `lease`."""
        with self._lock:
            for entry in leased:
                entry.users -= 1
                if entry.users:
                    continue
                if self._entries.get(entry.id) is entry:
                    self._set_idle(entry)
                else:
                    self._forget_size(entry)

    def expire(self) -> None:
        """Drops what is too old. Called now and then, for the memory's sake; whoever asks sees none of it anyway."""
        with self._lock:
            self._expire(self._clock())

    # --- under the lock ---------------------------------------------------------------------------------------------

    def _expire(self, now: float) -> None:
        while self._entries:
            first = next(iter(self._entries.values()))
            if first.kept_until > now:
                return
            self._remove(first)

    def _make_room(self, size: int, owned: _Owned) -> None:
        if size > self._max_owner_bytes:
            raise TooLarge
        while owned.size + size > self._max_owner_bytes or len(owned.entries) >= MAX_ENTRIES:
            self._remove_oldest(owned.idle)
        while self._bytes + size > self._max_bytes:
            self._remove_oldest(self._idle)

    def _remove_oldest(self, idle: OrderedDict[str, StoredRows]) -> None:
        if not idle:
            raise StoreFull
        self._remove(next(iter(idle.values())))

    def _remove(self, entry: StoredRows) -> None:
        """Nobody finds it any more."""
        owned = self._owners[entry.owner]
        for each in (self._entries, self._idle, owned.entries, owned.idle):
            each.pop(entry.id, None)
        if not entry.users:
            self._forget_size(entry)

    def _forget_size(self, entry: StoredRows) -> None:
        self._bytes -= entry.size
        self._owners[entry.owner].size -= entry.size

    def _set_idle(self, entry: StoredRows) -> None:
        self._idle[entry.id] = self._owners[entry.owner].idle[entry.id] = entry

    def _touch(self, entry: StoredRows) -> None:
        if not entry.users:
            self._idle.move_to_end(entry.id)
            self._owners[entry.owner].idle.move_to_end(entry.id)


def _id(owner: int, sha256: str) -> str:
    return "emb_" + _sha256(f"{owner} {sha256}".encode()).hexdigest()[:40]
