"""How long engine requests may take: in the queue, and in all. Part of the engine client, which ends those that take
longer; nothing here runs where no limit is set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from server.errors import APIError, RequestTimeout, Unavailable
from server.generation import Inbox


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds; None: as long as it takes."""

    queue: float | None = None
    """Until the prompt has its first slot."""
    request: float | None = None
    """From the HTTP request's arrival to the end of its answer."""

    def start(self, inbox: Inbox, give_up: Callable[[Inbox, APIError], None]) -> None:
        """`give_up` is called with what the client is told. The timers are cancelled by whoever ends the request."""
        if self.queue is not None:
            inbox.timers.append(inbox.loop.call_later(self.queue, self._end_of_wait, inbox, give_up))
        if self.request is not None:
            arrived = inbox.created if inbox.context is None else inbox.context.started
            left = max(0.0, arrived + self.request - inbox.created)
            inbox.timers.append(inbox.loop.call_later(left, give_up, inbox, RequestTimeout(self.request)))

    def _end_of_wait(self, inbox: Inbox, give_up: Callable[[Inbox, APIError], None]) -> None:
        if not inbox.first_slot:
            give_up(inbox, Unavailable(f"The request has waited for its turn for {self.queue:g} s."))


NO_TIMEOUTS = Timeouts()
