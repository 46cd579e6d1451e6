"""A TCP server that says exactly what a test tells it to, and a clock that a test sets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from server.bench.http_connection import Target

Script = Callable[["Exchange"], Awaitable[None]]


class Ticks:
    """Each reading is one second after the one before."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@dataclass
class Exchange:
    """One request, and where its answer goes."""

    head: bytes
    body: bytes
    number: int
    """Of the connection's requests."""
    writer: asyncio.StreamWriter

    async def send(self, *pieces: bytes) -> None:
        """Each piece in a packet of its own."""
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(0.005)

    def hang_up(self) -> None:
        self.writer.close()


@dataclass
class Served:
    port: int
    connections: int = 0
    exchanges: list[Exchange] = field(default_factory=list)

    @property
    def target(self) -> Target:
        return Target.parse(f"http://127.0.0.1:{self.port}")


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[Served]:
    served = Served(0)
    writers: list[asyncio.StreamWriter] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.connections += 1
        writers.append(writer)
        number = 0
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                lengths = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
                body = await reader.readexactly(int(lengths[0].partition(b":")[2]) if lengths else 0)
                exchange = Exchange(head, body, number, writer)
                served.exchanges.append(exchange)
                number += 1
                await script(exchange)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    served.port = server.sockets[0].getsockname()[1]
    try:
        yield served
    finally:
        for writer in writers:
            writer.close()
        server.close()
        await server.wait_closed()


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def token(text: str = " a") -> bytes:
    return b'data: {"choices":[{"index":0,"text":"%b"}]}\n\n' % text.encode()


def usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    counts = b'{"prompt_tokens":%d,"completion_tokens":%d}' % (prompt_tokens, completion_tokens)
    return b'data: {"choices":[],"usage":%b}\n\n' % counts


DONE = b"data: [DONE]\n\n"


def whole(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d Said\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)
