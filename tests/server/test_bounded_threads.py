"""Work that takes too long, work that nobody waits for, and work that fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from server.bounded_threads import BoundedThreads, TookTooLong


def endless(began: threading.Event, ended: list[str]) -> Callable[[], None]:
    """Ends only when it is interrupted, and says by what."""

    def work() -> None:
        try:
            began.set()  # in here: who waits for it may interrupt at once
            while True:
                try:
                    sum(range(100))
                except Exception:  # noqa: S112 - like a template that catches whatever it can
                    continue
        except BaseException as error:
            ended.append(type(error).__name__)
            raise

    return work


def test_what_takes_too_long_is_interrupted() -> None:
    ended: list[str] = []

    async def main() -> int:
        threads = BoundedThreads(1, 0.05, "test")
        try:
            with pytest.raises(TimeoutError):
                await threads.run(endless(threading.Event(), ended))
            # The one thread is free again.
            threads._seconds = 60
            return await threads.run(lambda: 7)
        finally:
            threads.close()

    assert asyncio.run(main()) == 7
    assert ended == [TookTooLong.__name__]


def test_what_nobody_waits_for_is_interrupted() -> None:
    ended: list[str] = []

    async def main() -> int:
        threads = BoundedThreads(1, 3600, "test")
        began = threading.Event()
        try:
            running = asyncio.create_task(threads.run(endless(began, ended)))
            queued = asyncio.create_task(threads.run(lambda: ended.append("never")))
            await asyncio.to_thread(began.wait)
            running.cancel()
            queued.cancel()
            await asyncio.gather(running, queued, return_exceptions=True)
            return await threads.run(lambda: 7)
        finally:
            threads.close()

    assert asyncio.run(main()) == 7
    assert ended == [TookTooLong.__name__]


def test_time_in_the_queue_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one waits for the others for longer than any may take. (By a clock of the test's: one that a machine
    holds up for a second has not taken that long.)"""
    now = 0.0
    monkeypatch.setattr("server.bounded_threads.time", SimpleNamespace(monotonic=lambda: now))

    def work() -> bool:
        nonlocal now
        now += 0.04
        return threading.Event().wait(0.12)  # while its time is looked at

    async def main() -> list[bool]:
        threads = BoundedThreads(1, 0.05, "test")
        try:
            return await asyncio.gather(*(threads.run(work) for _ in range(4)))
        finally:
            threads.close()

    assert asyncio.run(main()) == [False] * 4


def test_errors_come_through() -> None:
    async def main() -> None:
        threads = BoundedThreads(1, 10, "test")
        try:
            await threads.run(lambda: 1 / 0)
        finally:
            threads.close()

    with pytest.raises(ZeroDivisionError):
        asyncio.run(main())
