"""A semaphore that is fair to API keys: of those who wait, keys are let in by turns, and each key's own as they came.
Used by `vision`: preparing a large image takes up to a second of a thread, and one key may send hundreds of them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager


class Turns:
    """`count` at once. Everything here runs on the event loop's thread."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}
        """By key, whose turn it is first."""

    @asynccontextmanager
    async def turn(self, key: Hashable) -> AsyncIterator[None]:
        await self.enter(key)
        try:
            yield
        finally:
            self.leave()

    async def enter(self, key: Hashable) -> None:
        """Whoever is let in calls `leave` in the end."""
        if self._free:  # then nobody waits
            self._free -= 1
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.cancelled():
                self._give_up(key, future)
            else:  # let in at the same moment
                self.leave()
            raise

    def leave(self) -> None:
        while self._waiting:
            key, queue = next(iter(self._waiting.items()))
            del self._waiting[key]
            future = queue.popleft()
            if queue:
                self._waiting[key] = queue  # the others' turn
            if not future.done():  # else cancelled, and about to notice: of thousands, when their client dies
                future.set_result(None)
                return
        self._free += 1

    def _give_up(self, key: Hashable, future: asyncio.Future[None]) -> None:
        queue = self._waiting.get(key, deque())
        if future in queue:
            queue.remove(future)
            if not queue:
                del self._waiting[key]
