"""The operators' routes: probes, version and metrics. They never wait for the engine."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, PlainTextResponse, Response

from server.lifecycle import Lifecycle
from server.metrics import Metrics


def package_version() -> str:
    try:
        return version("intarsia")
    except PackageNotFoundError:  # Run from a checkout that is not installed.
        return "0.0.0"


def health_router(lifecycle: Lifecycle) -> APIRouter:
    """The probes proper."""
    router = APIRouter(tags=["operation"])

    async def readyz() -> Response:
        """200 while requests should be sent here; 503 while loading, draining, stalled or failed."""
        return _probe(lifecycle.not_ready())

    async def livez() -> Response:
        """503 when only a restart helps: the runner is dead, or has been silent for a minute."""
        return _probe(lifecycle.not_live())

    for path, probe in (("/health", readyz), ("/ping", readyz), ("/readyz", readyz), ("/livez", livez)):
        summary = "Alias of /readyz" if probe is readyz and path != "/readyz" else None
        router.add_api_route(path, probe, methods=["GET"], summary=summary, operation_id=path[1:])
        router.add_api_route(path, probe, methods=["HEAD"], include_in_schema=False)
    return router


def probes_router(lifecycle: Lifecycle, metrics: Metrics) -> APIRouter:
    router = health_router(lifecycle)

    async def version_() -> dict[str, str]:
        """The server's version."""
        return {"version": package_version()}

    async def load() -> dict[str, int]:
        """How many API requests are being answered."""
        return {"server_load": metrics.in_flight}

    async def metrics_() -> Response:
        """Prometheus metrics."""
        body, content_type = metrics.exposition()
        return Response(body, headers={"content-type": content_type})

    router.add_api_route("/version", version_, methods=["GET"], operation_id="version")
    router.add_api_route("/load", load, methods=["GET"], operation_id="load")
    formats: dict[str, Any] = {"text/plain": {}}
    router.add_api_route(
        "/metrics",
        metrics_,
        methods=["GET"],
        operation_id="metrics",
        response_class=PlainTextResponse,
        responses={200: {"content": formats}},
    )
    return router


def _probe(reason: str | None) -> Response:
    if reason is None:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": reason}, 503, {"Retry-After": "5"})
