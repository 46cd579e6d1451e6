"""Work that goes on when its HTTP request has been answered. Started by the routes of responses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class BackgroundTasks:
    """Those of this process. `on_begin`, `on_end`: called around each, so that a drain waits for what has begun."""

    def __init__(self, on_begin: Callable[[], None] = lambda: None, on_end: Callable[[], None] = lambda: None) -> None:
        self._on_begin, self._on_end = on_begin, on_end
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """With the current context. `work` doesn't raise."""
        self._on_begin()
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._on_end()
