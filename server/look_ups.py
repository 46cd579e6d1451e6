"""Look-ups of input rows that the runner has not answered in full. Kept by the engine client, on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from runner.messages import TokenRows
from server.errors import APIError, Unavailable


class LookUps:
    def __init__(self) -> None:
        self._open: dict[int, tuple[list[bytes], asyncio.Future[list[bytes]]]] = {}

    @asynccontextmanager
    async def open(self, number: int, seconds: float) -> AsyncGenerator[asyncio.Future[list[bytes]]]:
        """The answer to look-up `number`, in the body; raises Unavailable where it does not come in time. What comes
        after the body is dropped."""
        future: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()
        self._open[number] = [], future
        try:
            async with asyncio.timeout(seconds):
                yield future
        except TimeoutError:
            raise Unavailable("The engine does not answer.") from None
        finally:
            del self._open[number]
            future.cancel()

    def add(self, message: TokenRows) -> None:
        found = self._open.get(message.request)
        if found is not None and not found[1].done():
            found[0].append(message.rows)
            if message.is_last:
                found[1].set_result(found[0])

    def reject(self, number: int, error: APIError) -> bool:
        """Whether there was one to reject."""
        found = self._open.get(number)
        if found is None or found[1].done():
            return False
        found[1].set_exception(error)
        return True

    def fail(self, error: APIError) -> None:
        """The runner is gone."""
        for number in list(self._open):
            self.reject(number, error)
