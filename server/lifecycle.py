"""Whether the server takes requests: the one answer behind the probes, the gate before the routes, and the drain.

loading ── model and services are there ──► serving ── first SIGTERM ──► draining ──► exit
    └───────────────── the runner dies ────────┴──────────► failed ──► exit
"""

from __future__ import annotations

import asyncio
import time

from server.engine_client import EngineClient
from server.errors import APIError, EngineFailed, Unavailable


class Lifecycle:
    """Asked by the probes and the gate, told by the `serve` command."""

    def __init__(self, engine: EngineClient, *, ready_seconds: float = 10.0, live_seconds: float = 60.0) -> None:
        self.loaded = False
        """The model is loaded and the routes have what they need."""
        self.draining = False
        self.in_flight = 0
        """API requests that are being answered by this process."""
        self._engine = engine
        self._ready_seconds = ready_seconds
        self._live_seconds = live_seconds
        self._idle = asyncio.Event()
        self._idle.set()

    def not_ready(self) -> str | None:
        """Why no more requests should be sent here, or None."""
        if self._engine.failure is not None:
            return "failed"
        if self.draining:
            return "draining"
        if not self.loaded:
            return "loading"
        return "stalled" if self._heartbeat_age() > self._ready_seconds else None

    def not_live(self) -> str | None:
        """Why the server should be restarted, or None. Loading may take its time."""
        if self._engine.failure is not None:
            return "failed"
        return "stalled" if self.loaded and self._heartbeat_age() > self._live_seconds else None

    def refusal(self) -> APIError | None:
        """What an API request is refused with. More patient than `not_ready`: one long step on a slow device makes the
        server unready, but who asks nevertheless may wait; only a runner that looks dead is not asked any more."""
        if self._engine.failure is not None:
            return EngineFailed(self._engine.failure)
        if self.draining:
            return Unavailable("The server is shutting down.", retry_after=1)
        if not self.loaded:
            return Unavailable("The model is still loading.")
        return Unavailable("The engine does not answer.") if self.not_live() else None

    def enter(self) -> None:
        self.in_flight += 1
        self._engine.metrics.count_in_flight(1)
        self._idle.clear()

    def leave(self) -> None:
        self.in_flight -= 1
        self._engine.metrics.count_in_flight(-1)
        if not self.in_flight:
            self._idle.set()

    async def idle(self) -> None:
        """Wait until nothing is in flight."""
        await self._idle.wait()

    def _heartbeat_age(self) -> float:
        return time.monotonic() - self._engine.last_heartbeat
