"""Starts a server as tests.server.launch does, with a timer of one millisecond in its event loop that notes how late it
was called: what a stream or a probe would have waited. For `tests.bench.stalls`.

    python -m tests.bench.late_loop CONFIG_JSON

The environment's LATENESS names a file of float64: how many values there have been, then the values, in seconds.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

import msgspec
import numpy as np
import uvloop

TICK_SECONDS = 0.001
CAPACITY = 1 << 20


class Ticker:
    def __init__(self, loop: asyncio.AbstractEventLoop, path: str) -> None:
        self._loop = loop
        self._found: Any = np.memmap(path, np.float64, "r+", shape=(CAPACITY,))
        self._count = 0
        self._due = time.perf_counter()

    def tick(self) -> None:
        now = time.perf_counter()
        if self._count + 1 < CAPACITY:
            self._found[self._count + 1] = now - self._due
            self._count += 1
            self._found[0] = self._count
        self._due = time.perf_counter() + TICK_SECONDS
        self._loop.call_later(TICK_SECONDS, self.tick)


def main() -> int:
    new_event_loop = uvloop.new_event_loop

    def with_ticker() -> uvloop.Loop:
        loop = new_event_loop()
        loop.call_soon(Ticker(loop, os.environ["LATENESS"]).tick)
        return loop

    uvloop.new_event_loop = with_ticker
    from server.config import ServerConfig
    from server.serve import serve

    return serve(msgspec.json.decode(sys.argv[1], type=ServerConfig))


if __name__ == "__main__":
    sys.exit(main())
