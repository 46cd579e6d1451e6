"""Memory that answers hold, beside the body that they answer and what they have sent: rows on their way out
(`rows_out`), what is kept of a response's input and told of its request, and what the runner keeps while it is read
again: responses, and the conversations before them. Bounded for each API process.

Used by the routes; part of `services`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from server.errors import QueueFull
from server.request_context import current_request

MAX_BYTES = 1 << 30

Reserve = Callable[[int], None]
"""Called with bytes. Raises QueueFull."""


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
        self._take(nbytes)
        context.on_end.append(lambda: self._give_back(nbytes))

    @contextmanager
    def held(self) -> Iterator[Reserve]:
        """What is reserved with what this gives is given back at the end of the body."""
        total = 0

        def reserve(nbytes: int) -> None:
            nonlocal total
            self._take(nbytes)
            total += nbytes

        try:
            yield reserve
        finally:
            self._give_back(total)

    def _take(self, nbytes: int) -> None:
        if self.used and self.used + nbytes > self._capacity:
            raise QueueFull("Too much is held for answers that have not ended: rows, conversations, responses.")
        self.used += nbytes

    def _give_back(self, nbytes: int) -> None:
        self.used -= nbytes
