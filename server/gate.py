"""Middleware: lets API requests in only while the server is serving, and counts those inside, so that a drain knows
when the last one has left. Operators' routes pass always."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from server.lifecycle import Lifecycle

OPERATOR_PATHS = frozenset({"/health", "/livez", "/load", "/metrics", "/ping", "/readyz", "/version"})
"""Answered in every phase. Compared with the exact path that the router matches."""


class Gate:
    def __init__(self, app: ASGIApp, lifecycle: Lifecycle) -> None:
        self._app = app
        self._lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPERATOR_PATHS:
            await self._app(scope, receive, send)
            return
        refusal = self._lifecycle.refusal()
        if refusal is not None:
            await refusal.response()(scope, receive, send)
            return
        self._lifecycle.enter()
        try:
            await self._app(scope, receive, send)
        finally:
            self._lifecycle.leave()
