"""Puts the FastAPI application together: the routes, the layers around them, and OpenAI's error shape everywhere."""

from __future__ import annotations

from fastapi import FastAPI

from server import (
    abort,
    chat,
    completions,
    models,
    prompt_embeds,
    render,
    text_embeddings,
    token_embeddings,
    tokenize,
)
from server.auth import Auth
from server.body_limit import BodyLimit
from server.config import ServerConfig
from server.cross_origin import CrossOrigin
from server.engine_client import EngineClient
from server.errors import install_error_handlers
from server.gate import Gate
from server.lifecycle import Lifecycle
from server.openapi import install_openapi
from server.playground import Playground
from server.playground import router as playground_router
from server.probes import package_version, probes_router
from server.request_log import RequestLog
from server.responses import routes as responses
from server.route_paths import RoutePaths
from server.tracing import Tracing


def create_app(
    config: ServerConfig, engine: EngineClient, lifecycle: Lifecycle, tracing: Tracing | None = None
) -> FastAPI:
    """The application. Its API routes find what they work with in `app.state.services`, which `serve` sets before it
    lets requests in (`lifecycle.loaded`)."""
    # No /docs and /redoc: these pages run scripts of a CDN's in this server's origin. /openapi.json is there.
    app = FastAPI(title="Intarsia", version=package_version(), redirect_slashes=False, docs_url=None, redoc_url=None)
    install_error_handlers(app)
    routers = [probes_router(lifecycle, engine.metrics)]
    routes = (completions, chat, responses, prompt_embeds, text_embeddings, token_embeddings)
    routers += [module.router for module in (*routes, render, models, tokenize, abort)]
    if config.playground:
        routers.append(playground_router)
    for router in routers:
        app.include_router(router)
    install_openapi(app, config.model_names)

    def body_limit() -> int:
        model = engine.model
        if model is None:
            return 0
        return config.body_limit_for(model.max_model_len, model.hidden_size, sees=model.vision is not None)

    # The last one added is the outermost. All are plain ASGI: BaseHTTPMiddleware hides the client's disconnect.
    app.add_middleware(BodyLimit, limit=body_limit)
    app.add_middleware(Gate, lifecycle=lifecycle)
    app.add_middleware(Auth, api_keys=[key.secret for key in config.keys])
    if config.cors_origins:
        app.add_middleware(CrossOrigin, origins=config.cors_origins)
    if config.playground:
        app.add_middleware(Playground)
    names = [key.name for key in config.keys]
    paths = RoutePaths(route for router in routers for route in router.routes)
    app.add_middleware(RequestLog, metrics=engine.metrics, paths=paths, key_names=names, tracing=tracing)
    return app
