"""Clients that do not read their answers. Used by `http_protocol`, one `SlowReader` a connection.

What a client has not read is held here and in the kernel. A stream stops being written once its connection is full, so
a client that never reads costs little, but it costs it without end; and a whole answer is held as it is. So a
connection that stays full has to get on: within each period by `_MIN_BYTES`, and by a part of what it held at first, so
that large answers end too. What it held counts what waits for room, before it has been handed to the connection (see
`answer_pieces`). A client that is merely slow, a voice that speaks as fast as it reads, is far from that.

What is not seen here, the kernel sees (see `listener`): a peer that has vanished, or takes nothing at all.
"""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from collections.abc import Callable

_MIN_BYTES = 64 << 10
_MIN_PART = 32
"""One in so many bytes: what was full is read, or cut, after so many periods."""
PERIOD_SECONDS = 120.0


class SlowReader:
    """Watches `transport` from the moment when it is full, or closed with something left to write (`on_full`), until it
    no longer is, and calls `cut`, which aborts it, when its client takes too little. No call is needed when it is read:
    what is looked at is how much is left."""

    def __init__(self, transport: asyncio.Transport, period: float, cut: Callable[[], None]) -> None:
        self._transport = transport
        self._period = period
        self._cut = cut
        self._timer: asyncio.TimerHandle | None = None
        self._owed = 0
        self._fills = 0
        """How often it has been full: more than before is progress too, of a stream."""
        self._seen = (0, 0)
        self._step = 0

    def on_full(self) -> None:
        self._fills += 1
        if self._timer is None:
            self._begin()

    def owe(self, nbytes: int) -> None:
        """So much of an answer under way waits until there is room for it."""
        is_next = nbytes > self._owed
        self._owed = nbytes
        if is_next and self._timer is not None:
            self.stop()
            self._begin()  # It has not had its time yet, and is measured by its own size.

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin(self) -> None:
        held = self._held()
        self._step = max(_MIN_BYTES, held // _MIN_PART)
        self._watch(held)

    def _watch(self, held: int) -> None:
        self._seen = self._fills, held
        self._timer = asyncio.get_running_loop().call_later(self._period, self._look)

    def _look(self) -> None:
        self._timer = None
        fills, before = self._seen
        if not self._owed and not self._is_full():
            return  # When it is again, `on_full` says so.
        held = self._held()
        # A piece of an answer fills it as often as a little of the one before has been read: that is no progress.
        is_filled_again = self._fills != fills and not self._owed
        if not is_filled_again and before - held < self._step:
            self._cut()
        else:
            self._watch(held)

    def _is_full(self) -> bool:
        """A connection that is being closed stays until all of its answer has been taken."""
        low, _ = self._transport.get_write_buffer_limits()
        return self._transport.get_write_buffer_size() > (0 if self._transport.is_closing() else low)

    def _held(self) -> int:
        """Bytes that the client has not acknowledged, ours and the kernel's."""
        return self._owed + self._transport.get_write_buffer_size() + _kernel_bytes(self._transport)


def _kernel_bytes(transport: asyncio.Transport) -> int:
    connection = transport.get_extra_info("socket")
    try:
        (size,) = struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)))
    except (AttributeError, OSError, ValueError):  # not a socket, or none any more
        return 0
    return int(size)
