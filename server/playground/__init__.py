"""The playground: one page at `/` for trying the server in a browser. Off with --no-playground.

The files are the same for everybody and hold nothing of the server's, so they are answered before authentication and in
every phase: a browser that opens a page cannot send a key. What the page then asks for, its own numbers included, needs
the key like anything else. `create_app` puts `Playground` around the application and `router` into it.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from server.services import services_of

_FOLDER = Path(__file__).parent
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}

HEADERS = {
    # Everything comes from here, nothing is inline, and nobody may frame it.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cache-control": "no-cache",
}

router = APIRouter()


@router.get("/playground/config", include_in_schema=False)
async def config(request: Request) -> dict[str, Any]:
    """What the page shows of model and engine, and no route of OpenAI's says."""
    services = services_of(request)
    model = services.model
    return {
        "model_type": model.model_type,
        "dtype": model.dtype,
        "hidden_size": model.hidden_size,
        "max_model_len": model.max_model_len,
        "max_num_seqs": model.max_num_seqs,
        "block_size": model.block_size,
        "num_blocks": model.num_blocks - 1,  # one is for padding
        "soft_prompts": list(services.soft_prompts.rows),
        "takes_embeddings": services.enable_prompt_embeds,
    }


class Playground:
    """Middleware: answers GET and HEAD of exactly its own paths. The files are read once, at the start."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        files = [path for path in sorted(_FOLDER.iterdir()) if path.suffix in _TYPES]
        self._files = {_url(path): _File(path, _url(path)) for path in files}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        file = self._files.get(scope["path"]) if scope["type"] == "http" else None
        if file is None or scope["method"] not in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        scope["route"] = file  # as the router does: the request's log line and trace name it by its path
        known = dict(scope["headers"]).get(b"if-none-match", b"")
        await file.response(known.decode("latin-1"))(scope, receive, send)


class _File:
    def __init__(self, path: Path, url: str) -> None:
        self.path = url
        self._body = path.read_bytes()
        self._type = f"{_TYPES[path.suffix]}; charset=utf-8"
        self._etag = f'"{sha256(self._body).hexdigest()[:24]}"'

    def response(self, known: str) -> Response:
        headers = {**HEADERS, "etag": self._etag}
        if known == self._etag:
            return Response(None, 304, headers)
        return Response(self._body, 200, {**headers, "content-type": self._type})


def _url(path: Path) -> str:
    return "/" if path.name == "index.html" else f"/playground/{path.name}"
