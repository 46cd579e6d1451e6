"""The line between the first API process and another one: short words, and open connections along with them.

A socket pair that keeps messages apart (SOCK_SEQPACKET). End of file means that the other process is gone, or wants
this one to go.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Literal

Word = Literal["take", "drain", "failed", "loaded", "idle"]
"""To a worker: take this connection; take no more requests; the runner is gone. From it: ready to take connections;
nothing is in flight any more."""

_MAX_BYTES = 64
_RETRY_SECONDS = 0.05
_WORDS_PER_CALLBACK = 64

OnWord = Callable[[str, socket.socket | None], None]


class Channel:
    """One end. Used on the event loop's thread."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_word: OnWord = lambda word, connection: None
        self._on_close: Callable[[], None] = lambda: None

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """This process's end, and the one for the other process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), theirs

    def listen(self, on_word: OnWord, on_close: Callable[[], None]) -> None:
        """`on_word` owns the connection that it gets. `on_close` is called once; then the channel is closed."""
        self._loop = asyncio.get_running_loop()
        self._on_word, self._on_close = on_word, on_close
        self._loop.add_reader(self._socket.fileno(), self._on_readable)

    def hand_over(self, connection: socket.socket) -> bool:
        """Give `connection` to the other process. False (and nothing is changed) when it takes none at the moment."""
        try:
            socket.send_fds(self._socket, [b"take"], [connection.fileno()])
        except OSError:
            return False
        connection.close()
        return True

    def tell(self, word: Word) -> None:
        """Sent now, or as soon as there is room; dropped when the other process is gone."""
        try:
            self._socket.send(word.encode())
        except BlockingIOError:
            asyncio.get_running_loop().call_later(_RETRY_SECONDS, self.tell, word)
        except OSError:
            pass

    def close(self) -> None:
        if self._loop is not None and self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
        self._socket.close()

    def _on_readable(self) -> None:
        for _ in range(_WORDS_PER_CALLBACK):
            try:
                data, fds, _, _ = socket.recv_fds(self._socket, _MAX_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            connection = socket.socket(fileno=fds[0]) if fds else None
            if not data:
                self.close()
                self._on_close()
                return
            self._on_word(data.decode(), connection)
            if self._socket.fileno() < 0:
                return
