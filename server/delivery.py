"""Whether an answer has left this process, and if not, why. `http_protocol` knows, the log line has to say it
(`request_log`).

The framework does not tell: what is sent to a client that has gone is dropped without a word, so an application that
goes by what it has sent takes every such answer for a complete one.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

CLIENT_CLOSED_REQUEST = 499
"""nginx's. No client receives it for an answer that was cut; it is what the log, the metrics and the traces say."""


class Cut(StrEnum):
    """Why an answer ended before its end."""

    CLIENT_LEFT = "client_left"
    """It has closed the connection, or vanished."""
    NOT_READ = "not_read"
    """It took too little of the answer for too long (`slow_readers`)."""
    INVALID_HTTP = "invalid_http"
    """What it sent on the same connection behind its request, or as its body, is no HTTP."""
    FAULT = "fault"
    """Ours: an exception that nobody expected."""
    SHUTDOWN = "shutdown"
    """The server ended, and could not wait any longer."""

    @property
    def status(self) -> int:
        """What such an answer counts as, whatever status its head had."""
        return {Cut.FAULT: 500, Cut.SHUTDOWN: 503}.get(self, CLIENT_CLOSED_REQUEST)


DELIVERY = "intarsia.delivery"
"""The extension of ASGI by which the protocol offers its `Delivery`."""


class Delivery(Protocol):
    """Of one answer, on its connection."""

    @property
    def cut(self) -> Cut | None:
        """Why the connection takes nothing more of the answer. None: it does, or has all of it."""

    async def sent(self) -> Cut | None:
        """Called when all of the answer was handed to the connection, and waits until no more of it is here than fits
        between a connection's marks (64 KiB). What the system has, nobody can follow."""


class Unwatched:
    """`Delivery` where the application runs behind another protocol than ours."""

    cut: Cut | None = None

    async def sent(self) -> Cut | None:
        return None
