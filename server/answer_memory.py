"""Memory that answers hold until they have ended, beside the body that they answer and what they have sent: rows on
their way out (`rows_out`), and what is kept of a response's input. Bounded for each API process.

Used by the routes; part of `services`.
"""

from __future__ import annotations

from server.errors import QueueFull
from server.request_context import current_request

MAX_BYTES = 1 << 30


class AnswerMemory:
    """What all answers under way hold, or may come to hold."""

    def __init__(self, capacity: int = MAX_BYTES) -> None:
        self._capacity = capacity
        self.used = 0
        """Bytes."""

    def reserve(self, nbytes: int) -> None:
        """Until the HTTP request that is being answered is over, or the response in the background. Raises
        QueueFull."""
        context = current_request.get()
        if not nbytes or context is None:
            return
        if self.used and self.used + nbytes > self._capacity:
            raise QueueFull("Too many rows or conversations are held for answers that have not ended.")
        self.used += nbytes
        context.on_end.append(lambda: self._give_back(nbytes))

    def _give_back(self, nbytes: int) -> None:
        self.used -= nbytes
