"""Middleware: every route needs one of the server's API keys, except the three probes. Deny by default: a route that is
added tomorrow is guarded too, and so is every path that does not exist."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from hmac import compare_digest

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import Unauthorized

OPEN_PATHS = frozenset({"/health", "/livez", "/readyz"})
"""Compared with the exact path that the router matches: `//livez` and `/livez/` are other paths, and need a key."""


class Auth:
    """`api_keys` empty: everybody is let in."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        self._digests = tuple(sha256(key.encode(errors="surrogateescape")).digest() for key in api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._digests and scope["type"] != "lifespan":
            open_path = scope["type"] == "http" and scope["path"] in OPEN_PATHS
            if not open_path and not self._knows(Headers(scope=scope).get("authorization", "")):
                error = Unauthorized("The API key is missing or wrong: send it as 'Authorization: Bearer KEY'.")
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _knows(self, authorization: str) -> bool:
        """Digests have one length and every one is compared, so that the time taken tells nothing about the keys."""
        scheme, _, key = authorization.partition(" ")
        digest = sha256(key.strip().encode("latin-1")).digest()  # The bytes as they came.
        known = False
        for each in self._digests:
            known |= compare_digest(each, digest)
        return known and scheme.lower() == "bearer"
