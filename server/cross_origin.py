"""Middleware: which web pages may read answers (CORS). None may, unless the operator names their origins.

An origin is compared whole. Cookies and other credentials of a browser's own are never allowed: API keys come in a
header that the page itself sets. This layer lies before authorisation, because browsers ask (preflight) without it.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

_EXPOSED = ("retry-after", "x-request-id")
_METHODS = ("DELETE", "GET", "HEAD", "POST", "PUT")
_MAX_AGE = 600
"""Seconds for which a browser need not ask again."""


class CrossOrigin:
    """`origins` empty: as if this layer were not there."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = app
        self._origins = frozenset(origins)
        # Clients send headers of many names (OpenAI's package in a browser adds ten): all are allowed.
        self._cors = CORSMiddleware(
            app,
            allow_origins=tuple(origins),
            allow_methods=_METHODS,
            allow_headers=("*",),
            expose_headers=_EXPOSED,
            max_age=_MAX_AGE,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        allowed = scope["type"] == "http" and Headers(scope=scope).get("origin") in self._origins
        await (self._cors if allowed else self._app)(scope, receive, send)
