"""Middleware: every route needs one of the server's API keys, except the probes. Deny by default: a route that is
added tomorrow is guarded too, and so is every path that does not exist."""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import sha256
from hmac import compare_digest

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import Unauthorized
from server.request_context import current_request

OPEN_PATHS = frozenset({"/health", "/livez", "/ping", "/readyz"})
"""Compared with the exact path that the router matches: `//livez` and `/livez/` are other paths, and need a key."""


_HASHED = re.compile(r"sha256:([0-9a-fA-F]{64})", re.ASCII)


def hashed(api_keys: Sequence[str]) -> tuple[str, ...]:
    """The configuration's keys (`api_keys.parse_key`) as `sha256:…`, those that are already as they are; what stands
    behind a key stays. Nothing else is kept of it while the server runs: a dump of its memory opens nothing. Keys have
    to be long and random, then a plain digest is enough."""
    split = [key.split() for key in api_keys]
    return tuple(" ".join((f"sha256:{_digest(key).hex()}", *settings)) for key, *settings in split)


class Auth:
    """`api_keys`: plain or `hashed`. Empty: everybody is let in."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        self._digests = tuple(map(_digest, api_keys))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._digests and scope["type"] != "lifespan":
            open_path = scope["type"] == "http" and scope["path"] in OPEN_PATHS
            key = self._find(Headers(scope=scope).get("authorization", ""))
            if key is None and not open_path:
                error = Unauthorized("The API key is missing or wrong: send it as 'Authorization: Bearer KEY'.")
                await error.response()(scope, receive, send)
                return
            context = current_request.get()
            if context is not None:
                context.api_key = key
        await self._app(scope, receive, send)

    def _find(self, authorization: str) -> int | None:
        """Which key it is, or None. Digests have one length and every one is compared, so that the time taken tells
        nothing about the keys."""
        scheme, _, key = authorization.partition(" ")
        digest = sha256(key.strip().encode("latin-1")).digest()  # The bytes as they came.
        known = [index for index, each in enumerate(self._digests) if compare_digest(each, digest)]
        return known[0] if known and scheme.lower() == "bearer" else None


def _digest(api_key: str) -> bytes:
    if known := _HASHED.fullmatch(api_key):
        return bytes.fromhex(known[1])
    return sha256(api_key.encode(errors="surrogateescape")).digest()
