"""An event loop whose time is made up: sleeping takes none, and a schedule can be compared to the millisecond."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jump(selectors.SelectSelector):
    """Never waits: time jumps instead. For coroutines without sockets."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        self.now += timeout or 0.0
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.get_running_loop().time` is the clock that `work` sees."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
