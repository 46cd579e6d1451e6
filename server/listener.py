"""The socket that the server listens on, bound before anything slow is started, and who gets its connections.

One process accepts and deals the connections out in turn. Several processes that accept from one socket don't share
evenly: of 64 connections made at once four of them got 64, 0, 0 and 0, or 37, 23, 3 and 1; with a socket each
(SO_REUSEPORT) 20, 18, 16 and 10, and what waits in the queue of one that dies is lost. Streams are long, so whoever
gets twice the connections is the limit. Dealing costs some 40 µs a connection.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_ACCEPTS_PER_CALLBACK = 64
_PAUSE_SECONDS = 0.5
"""Without accepting, when there is no descriptor or memory for another connection."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

SILENT_SECONDS = 60.0
"""How long a peer may be silent: it answers no probe, or has no room for what it is sent."""
_TCP_NOTSENT_LOWAT = 25
"""Linux's number; Python has no name for it before 3.12."""
_MAX_UNSENT_BYTES = 256 << 10
"""Of an answer in the kernel, beyond what is on its way: the rest waits here, where it is seen (`slow_readers`)."""


def bind(host: str, port: int, silent_seconds: float = SILENT_SECONDS) -> socket.socket:
    """A listening socket. Raises OSError. It listens at once: two bound sockets do not collide before one listens."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for level, option, value in _inherited(silent_seconds):
            listener.setsockopt(level, option, value)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _inherited(silent_seconds: float) -> list[tuple[int, int, int]]:
    """Options that every connection has from the listener. A machine that loses its power says no goodbye, and a
    request that waits for its turn is sent nothing whose loss could be noticed: so the kernel asks now and then."""
    tcp = socket.IPPROTO_TCP
    return [
        (tcp, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (tcp, socket.TCP_KEEPIDLE, max(1, round(silent_seconds / 2))),
        (tcp, socket.TCP_KEEPINTVL, max(1, round(silent_seconds / 6))),
        (tcp, socket.TCP_KEEPCNT, 3),
        (tcp, socket.TCP_USER_TIMEOUT, round(silent_seconds * 1000)),
        (tcp, _TCP_NOTSENT_LOWAT, _MAX_UNSENT_BYTES),
    ]


class Taker(Protocol):
    """A worker, seen from here."""

    def take(self, connection: socket.socket) -> bool:
        """Serve `connection`, which is its own from now on. False when it can't: then it is not."""


class Dealer:
    """Accepts connections as long as the loop runs. `takers`: who is there at the moment, asked for each connection;
    the first is always able to take one."""

    def __init__(self, listener: socket.socket, takers: Callable[[], Sequence[Taker]]) -> None:
        self._listener = listener
        self._takers = takers
        self._turn = 0
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(listener.fileno(), self._on_readable)

    def close(self) -> None:
        self._loop.remove_reader(self._listener.fileno())

    def _on_readable(self) -> None:
        for _ in range(_ACCEPTS_PER_CALLBACK):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._pause(error)
                    return
                continue  # The client has left again.
            connection.setblocking(False)
            self._deal(connection)

    def _deal(self, connection: socket.socket) -> None:
        takers = self._takers()
        self._turn += 1
        order = [*takers[self._turn % len(takers) :], *takers]
        if not any(taker.take(connection) for taker in order):
            connection.close()

    def _pause(self, error: OSError) -> None:
        logger.error("no connections are accepted for %.1f s: %s", _PAUSE_SECONDS, error.strerror)
        self.close()
        self._loop.call_later(_PAUSE_SECONDS, self._resume)

    def _resume(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener.fileno(), self._on_readable)
