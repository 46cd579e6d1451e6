"""The order in which the device does what the host asks: one stream of work, and events that mark places in it.

The engine hands its device work to `Stream.run` and reads a result only after waiting for the event recorded behind
it. On CUDA the stream is a CUDA stream. On the CPU the work is *deferred*: it runs when an event behind it is waited
for, so the host is always as far ahead as the schedule allows. A missing wait, or a staging buffer that is rewritten
while its copy may still be in flight, then gives wrong tokens on every machine, and not only on a busy GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch


class Event(Protocol):
    def wait(self) -> None:
        """Blocks the host until everything handed to the stream before this event is done."""


class Stream(Protocol):
    def run(self, work: Callable[[], None]) -> None:
        """Does `work` after everything handed over before, at the latest when an event behind it is waited for."""

    def record(self, again: Event | None = None) -> Event:
        """`again`: an earlier event that has been waited for and that nobody asks any more: it may serve once more."""


class _CudaEvent:
    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.record()

    def record(self) -> None:
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()


class CudaStream:
    """The thread's current stream, so that whatever else the engine puts on the device is in the same order."""

    def run(self, work: Callable[[], None]) -> None:
        work()

    def record(self, again: Event | None = None) -> Event:
        if not isinstance(again, _CudaEvent):
            return _CudaEvent()
        again.record()
        return again


class DeferredStream:
    def __init__(self) -> None:
        self._queue: deque[Callable[[], None]] = deque()
        self._queued = 0
        self._done = 0

    def run(self, work: Callable[[], None]) -> None:
        self._queue.append(work)
        self._queued += 1

    def record(self, again: Event | None = None) -> Event:
        """Raises RuntimeError where `again` has not been waited for: on CUDA nobody would notice."""
        if not isinstance(again, _DeferredEvent):
            return _DeferredEvent(self, self._queued)
        if again.position > self._done:
            raise RuntimeError("an event is recorded again before it has been waited for")
        again.position = self._queued
        return again

    def run_until(self, count: int) -> None:
        while self._done < count:
            self._done += 1
            self._queue.popleft()()


class _DeferredEvent:
    def __init__(self, stream: DeferredStream, position: int) -> None:
        self._stream = stream
        self.position = position

    def wait(self) -> None:
        self._stream.run_until(self.position)


def make_stream(device: torch.device) -> Stream:
    return CudaStream() if device.type == "cuda" else DeferredStream()
