"""httptools' parser for a server that speaks HTTP/1 and nothing else. Used by `http_protocol`.

A client may offer to go on in another protocol (`Upgrade: h2c`, as Java's does with each first request), and a server
may take no notice. But the parser takes notice: to it the request ends with its head, and what follows is none of its
business. The body would be missing; and where it comes a moment later, it would be parsed as a request of its own, on a
connection that a proxy may share among clients.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Protocol

import httptools


class Callbacks(Protocol):
    """What is called of the protocol, which otherwise is called by the parser."""

    @property
    def transport(self) -> asyncio.Transport: ...

    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]: ...

    def on_message_complete(self) -> None: ...


class UpgradeFreeParser:
    """Its protocol ignores what it is told `while is_resuming`, but bodies and ends, and ends `while holds_end`."""

    def __init__(self, parser: httptools.HttpRequestParser, protocol: Callbacks) -> None:
        self._parser = parser
        self._protocol = protocol
        self._ends = False
        self._keeps_alive = True
        self.is_resuming = False
        """A parser reads a head of ours, after which it takes the body for one."""

    @property
    def holds_end(self) -> bool:
        """The message's head has ended, and the parser says that the message has."""
        return self._parser.should_upgrade() and not self._ends

    def feed_data(self, data: bytes) -> None:
        """Raises httptools.HttpParserError."""
        rest = memoryview(data)  # A read may hold thousands of heads, and each would copy all that follows.
        while rest:
            try:
                self._parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]
                self._resume()
            if self._protocol.transport.is_closing():
                return

    def _resume(self) -> None:
        """Where the head has ended."""
        framing = [each for each in self._protocol.headers if each[0].lower() in _FRAMING]
        if not framing:
            self._ends = True
            self._protocol.on_message_complete()
            self._ends = False
            return
        if not self._keeps_alive:
            framing.append((b"connection", b"close"))
        # A new one: where the connection is not kept alive, the other takes nothing any more.
        self._parser = httptools.HttpRequestParser(self._protocol)
        with contextlib.suppress(AttributeError):  # httptools < 0.6.3
            self._parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
        self.is_resuming = True
        self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(b"%b: %b\r\n" % each for each in framing))
        self.is_resuming = False

    def should_upgrade(self) -> bool:
        return False

    def should_keep_alive(self) -> bool:
        self._keeps_alive = bool(self._parser.should_keep_alive())
        return self._keeps_alive

    def get_method(self) -> bytes:
        return bytes(self._parser.get_method())

    def get_http_version(self) -> str:
        return str(self._parser.get_http_version())


_FRAMING = (b"content-length", b"transfer-encoding")
