"""Threads for work whose time a client can stretch, such as a chat template over ten thousand messages: what takes too
long is interrupted, and so is what nobody waits for any more.

An interrupt is an exception raised inside of the thread (`PyThreadState_SetAsyncExc`): it ends Python code at once, and
a call into C when that returns. Jinja's templates are Python code.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class TookTooLong(BaseException):
    """Not an Exception: the work must not be able to catch it by mistake."""


class BoundedThreads:
    def __init__(self, count: int, seconds: float, name: str) -> None:
        self._threads = ThreadPoolExecutor(count, thread_name_prefix=name)
        self._seconds = seconds

    async def run(self, function: Callable[[], T]) -> T:
        """`function` in a thread. Raises what it raises, or TimeoutError. Time in the queue does not count."""
        job = _Job(function)
        future = asyncio.get_running_loop().run_in_executor(self._threads, job.run)
        try:
            while not future.done():
                await asyncio.wait({future}, timeout=min(self._seconds, 1.0))
                if job.seconds >= self._seconds:
                    job.interrupt()
        except asyncio.CancelledError:
            future.cancel()  # if it has not begun
            job.interrupt()
            raise
        try:
            return future.result()
        except TookTooLong:
            raise TimeoutError from None

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Job(Generic[T]):
    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._thread: int | None = None
        """Set while the function runs. An interrupt is only sent then, under the lock: it cannot hit what the thread
        does afterwards."""
        self._started = float("inf")

    @property
    def seconds(self) -> float:
        """Since it began to run."""
        return time.monotonic() - self._started

    def run(self) -> T:
        with self._lock:
            self._thread, self._started = threading.get_ident(), time.monotonic()
        try:
            return self._function()
        finally:
            with self._lock:
                self._thread = None

    def interrupt(self) -> None:
        with self._lock:
            if self._thread is not None:
                exception = ctypes.py_object(TookTooLong)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), exception)
