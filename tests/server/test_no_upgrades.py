"""Many requests in one read that offer to go on in another protocol."""

from __future__ import annotations

from typing import Any

import httptools

from server.no_upgrades import UpgradeFreeParser

HEAD = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"


class Connection:
    """The protocol and its transport: closes when `most` messages have come."""

    def __init__(self, most: int) -> None:
        self.messages = 0
        self._most = most
        self._parser: UpgradeFreeParser | None = None
        self.headers = list[tuple[bytes, bytes]]()

    @property
    def transport(self) -> Any:
        return self

    def is_closing(self) -> bool:
        return self.messages >= self._most

    def read(self, data: bytes) -> None:
        self._parser = UpgradeFreeParser(httptools.HttpRequestParser(self), self)
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        if self._parser is None or not self._parser.holds_end:
            self.messages += 1


def test_nothing_is_parsed_for_a_connection_that_is_closing() -> None:
    for most, seen in ((100, 50), (3, 3)):
        connection = Connection(most)
        connection.read(HEAD * 50)
        assert connection.messages == seen


def test_what_follows_a_head_is_not_copied() -> None:
    """Else thousands of them in one read take a second, in which nobody else is served."""
    data = HEAD * 50
    fed = []

    class Parser:
        """Says of each head that it is an upgrade's."""

        def feed_data(self, rest: memoryview) -> None:
            fed.append(rest)
            raise httptools.HttpParserUpgrade(len(HEAD))

        def should_upgrade(self) -> bool:
            return True

    parser: Any = Parser()
    UpgradeFreeParser(parser, Connection(100)).feed_data(data)
    assert len(fed) == 50
    assert all(rest.obj is data for rest in fed)
