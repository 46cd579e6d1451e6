"""The responses that can be asked for again: in memory, bounded, and each for the API key that it was made with only.

A response is kept with the turns that it added to its conversation; those before it belong to the responses before it.
So a long conversation is kept once, and a response that was deleted is gone from every conversation.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

MAX_RESPONSES = 16384
MAX_BYTES = 256 << 20
MAX_RESPONSE_BYTES = 8 << 20
"""Of one: a larger one is not kept."""
MAX_CONVERSATION_BYTES = 16 << 20
"""Of all turns of one: more are not read again for one request."""
SECONDS = 24 * 3600.0
"""Since a response was last used."""

Owner = int | None
"""Which API key; None where the server has none."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    body: bytes
    """The response as JSON."""
    input_turns: bytes
    output_turns: bytes
    """What it added to the conversation: JSON, lists of `items.Turn`."""
    previous: str | None = None

    @property
    def size(self) -> int:
        return len(self.body) + len(self.input_turns) + len(self.output_turns) + 1024


@dataclass(slots=True)
class _Entry:
    response: StoredResponse
    used: float


class _Owned:
    """One owner's responses, the one that was used longest ago first."""

    def __init__(self) -> None:
        self.entries: OrderedDict[str, _Entry] = OrderedDict()
        self.size = 0

    def pop(self, response_id: str) -> None:
        self.size -= self.entries.pop(response_id).response.size

    def expire(self, before: float) -> None:
        while self.entries:
            first = next(iter(self.entries))
            if self.entries[first].used >= before:
                return
            self.pop(first)


class ResponseStore:
    """Where there is no room, the owner who takes most of it loses what it has not used for longest: a client can drive
    out its own responses, not another's."""

    def __init__(
        self,
        *,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
        seconds: float = SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._owned: dict[Owner, _Owned] = {}
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._max_response_bytes = max_response_bytes
        self._seconds = seconds
        self._clock = clock

    def __len__(self) -> int:
        return sum(len(each.entries) for each in self._owned.values())

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(each.size for each in self._owned.values())

    def add(self, owner: Owner, response_id: str, response: StoredResponse) -> bool:
        """False for one that is too large to be kept."""
        if response.size > min(self._max_response_bytes, self._max_bytes):
            return False
        now = self._clock()
        for each in self._owned.values():
            each.expire(now - self._seconds)
        owned = self._owned.setdefault(owner, _Owned())
        owned.entries[response_id] = _Entry(response, now)
        owned.size += response.size
        while self.size > self._max_bytes:
            _drop_oldest(max(self._owned.values(), key=lambda each: each.size))
        while len(self) > self._max_responses:
            _drop_oldest(max(self._owned.values(), key=lambda each: len(each.entries)))
        return True

    def get(self, owner: Owner, response_id: str) -> StoredResponse | None:
        owned, now = self._owned.get(owner), self._clock()
        if owned is None:
            return None
        owned.expire(now - self._seconds)
        entry = owned.entries.get(response_id)
        if entry is None:
            return None
        entry.used = now
        owned.entries.move_to_end(response_id)
        return entry.response

    def conversation(self, owner: Owner, response_id: str) -> list[StoredResponse] | None:
        """The response and all before it, the first one first; None unless all are there."""
        found: list[StoredResponse] = []
        wanted: str | None = response_id
        while wanted is not None:
            response = self.get(owner, wanted)
            if response is None:
                return None
            found.append(response)
            wanted = response.previous
        return found[::-1]

    def delete(self, owner: Owner, response_id: str) -> bool:
        if self.get(owner, response_id) is None:
            return False
        self._owned[owner].pop(response_id)
        return True


def _drop_oldest(owned: _Owned) -> None:
    owned.pop(next(iter(owned.entries)))
