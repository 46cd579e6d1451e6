"""`--probe-port`: the probes alone, in plain HTTP, on a port of their own.

For who has no certificate to show where `--ssl-ca-certs` wants one: a kubelet, and `intarsia healthcheck`. It tells
nothing but whether the server is ready and alive. Metrics stay behind the API's keys and its TLS.
"""

from __future__ import annotations

import socket

from fastapi import FastAPI

from server.errors import install_error_handlers
from server.http_server import HttpServer
from server.lifecycle import Lifecycle
from server.listener import Dealer
from server.probes import health_router


class ProbePort:
    """In the first API process, which answers for all. Connections come from `listener`, which is closed with it."""

    def __init__(self, listener: socket.socket, lifecycle: Lifecycle, silent_seconds: float) -> None:
        app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
        install_error_handlers(app)
        app.include_router(health_router(lifecycle))
        self._http = HttpServer(app, silent_seconds)
        self._http.start()
        self._listener = listener
        self._dealer = Dealer(listener, lambda: [self._http])

    async def stop(self) -> None:
        self._dealer.close()
        self._listener.close()
        await self._http.stop()
