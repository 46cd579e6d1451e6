"""The operators' routes: probes, version and metrics. They never wait for the engine."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from server.lifecycle import Lifecycle
from server.metrics import Metrics


def package_version() -> str:
    try:
        return version("intarsia")
    except PackageNotFoundError:  # Run from a checkout that is not installed.
        return "0.0.0"


def probes_router(lifecycle: Lifecycle, metrics: Metrics) -> APIRouter:
    router = APIRouter(tags=["operation"])

    async def readyz() -> Response:
        """200 while requests should be sent here; 503 while loading, draining, stalled or failed."""
        return _probe(lifecycle.not_ready())

    async def livez() -> Response:
        """503 when only a restart helps: the runner is dead, or has been silent for a minute."""
        return _probe(lifecycle.not_live())

    async def version_() -> dict[str, str]:
        """The server's version."""
        return {"version": package_version()}

    async def metrics_(request: Request) -> Response:
        """Prometheus metrics."""
        body, content_type = metrics.exposition(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    methods = ["GET", "HEAD"]
    router.add_api_route("/health", readyz, methods=methods, summary="Alias of /readyz", operation_id="health")
    router.add_api_route("/readyz", readyz, methods=methods, operation_id="readyz")
    router.add_api_route("/livez", livez, methods=methods, operation_id="livez")
    router.add_api_route("/version", version_, methods=["GET"], operation_id="version")
    router.add_api_route("/metrics", metrics_, methods=["GET"], operation_id="metrics")
    return router


def _probe(reason: str | None) -> Response:
    if reason is None:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": reason}, 503, {"Retry-After": "5"})
