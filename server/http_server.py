"""An application on connections that are handed to it: uvicorn without its listeners and signal handlers.

Each API process has one for the API (`worker`), the first perhaps another one for probes (`probe_port`).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Generator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from server.http_protocol import LimitedHttpProtocol, Writes
from server.tls import HANDSHAKE_SECONDS, SHUTDOWN_SECONDS, Certificate

FLUSH_SECONDS = 2.0
"""After their engine requests have failed, handlers get so long to send their error events."""
_KEEP_ALIVE_SECONDS = 75
"""Longer than the 60 s for which proxies keep idle connections: who closes first must not be us."""
_HEADERS = [("x-content-type-options", "nosniff"), ("x-frame-options", "DENY")]
"""Of every answer: what is JSON is not to be taken for a page, and a page of ours is not to be put into another."""


class _Uvicorn(uvicorn.Server):
    """Without its signal handlers: they would close the listener at the first SIGTERM."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class HttpServer:
    """`start`, connections through `take`, `stop`. `certificate`: None is plain HTTP. A `listener.Taker`."""

    def __init__(self, app: ASGIApp, silent_seconds: float, certificate: Certificate | None = None) -> None:
        self._silent_seconds = silent_seconds
        self._certificate = certificate
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                app,
                http=LimitedHttpProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                headers=_HEADERS,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=int(FLUSH_SECONDS),
            )
        )
        self._serving: asyncio.Task[None] | None = None
        self._connecting: set[asyncio.Task[None]] = set()
        self._writes: Writes | None = None
        """Of all connections."""

    def start(self) -> None:
        self._serving = asyncio.create_task(self._uvicorn.serve([]))

    def take(self, connection: socket.socket) -> bool:
        """Serve `connection`. Always possible."""
        task = asyncio.create_task(self._connect(connection))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return True

    async def stop(self) -> None:
        """Close the connections."""
        self._uvicorn.should_exit = True
        if self._serving is not None:
            await self._serving

    async def _connect(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(self._protocol, connection, **self._tls())
        except OSError:  # The client has left again, or does not speak TLS.
            connection.close()

    def _protocol(self) -> LimitedHttpProtocol:
        loop = asyncio.get_running_loop()
        if self._writes is None:
            self._writes = Writes(loop)
        protocol = LimitedHttpProtocol(self._uvicorn.config, self._uvicorn.server_state, {}, loop, self._writes)
        protocol.read_seconds = 2 * self._silent_seconds
        return protocol

    def _tls(self) -> dict[str, Any]:
        """Arguments of `connect_accepted_socket`."""
        if self._certificate is None:
            return {}
        seconds = {"ssl_handshake_timeout": HANDSHAKE_SECONDS, "ssl_shutdown_timeout": SHUTDOWN_SECONDS}
        return {"ssl": self._certificate.context(), **seconds}
