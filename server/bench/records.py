"""What is kept of each request. Made by `load`, sent by client processes to their parent, read by `summary`."""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, gc=False):
    """One request. Times are seconds of the system-wide monotonic clock (`time.perf_counter`), the same for all client
    processes of a machine; None: never came."""

    index: int
    """The request's number in the workload."""
    kind: str
    """"ids", "embeds", "multipart", "stored", "text" or "messages"."""
    start: float
    """When it was sent (a new connection is opened after this)."""
    end: float
    """When its answer was over, or it failed."""
    scheduled: float | None = None
    """Open loop: when it should have been sent."""
    first: float | None = None
    last: float | None = None
    gaps: list[float] = []
    num_events: int = 0
    expected_tokens: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    status: int | None = None
    error: str | None = None
    """Kind of failure; None: answered to the end."""
    detail: str = ""

    @property
    def ttft(self) -> float:
        return (self.first or 0.0) - self.start

    @property
    def e2el(self) -> float:
        """From sending to the last token."""
        return (self.last or 0.0) - self.start

    @property
    def num_tokens(self) -> int:
        """Of the answer: as the server counts them, or else as many as there were events."""
        return self.num_events if self.completion_tokens is None else self.completion_tokens

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None where there is none."""
        count = self.num_tokens - 1
        return ((self.last or 0.0) - (self.first or 0.0)) / count if count > 0 else None
