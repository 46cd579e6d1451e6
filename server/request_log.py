"""The outermost middleware: gives each request its id, and when it is over writes one line about it, counts it and
closes what its route left open. It is also where an exception that nobody expected ends.

The line holds ids, sizes and times. Never content: not the body, not the query, not even the path of an unknown route.
"""

from __future__ import annotations

import logging
import re
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import InternalError, log_exception
from server.gate import OPERATOR_PATHS
from server.metrics import Metrics
from server.request_context import RequestContext, current_request, new_request_id

logger = logging.getLogger("intarsia.request")

CLIENT_CLOSED_REQUEST = 499
"""Nobody receives this status; it is what the log and the metrics say of a client that went away."""

_CLIENT_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class RequestLog:
    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client_id = Headers(scope=scope).get("x-request-id", "")
        context = RequestContext(new_request_id(), client_id if _CLIENT_ID.fullmatch(client_id) else "")

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = context.id
            else:
                context.complete = not message.get("more_body", False)
            await send(message)

        token = current_request.set(context)
        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            # If the answer has begun, returning cuts the connection: a client must not take half of it for the whole.
            log_exception(error)
            if not context.status:
                await InternalError().response()(scope, receive, send_with_id)
        finally:
            current_request.reset(token)
            context.end()
            self._finish(scope, context)

    def _finish(self, scope: Scope, context: RequestContext) -> None:
        if not context.complete:
            context.status = CLIENT_CLOSED_REQUEST
        if scope["path"] in OPERATOR_PATHS and context.status in (200, 503):
            return  # Probes and scrapes come every few seconds and would drown the rest.
        self._metrics.count_response(context.status)
        if context.error is not None:
            self._metrics.count_error(context.error)
        if context.decode_seconds:
            self._metrics.embedding_decode_time.observe(context.decode_seconds)
        fields = [
            f"id={context.id}",
            f"route={getattr(scope.get('route'), 'path', 'unknown')}",
            f"method={scope['method']}",
            f"status={context.status}",
            f"ms={(time.monotonic() - context.started) * 1000:.1f}",
        ]
        if context.first_token is not None:
            fields.append(f"ttft_ms={context.first_token * 1000:.1f}")
        if context.finish_reasons:
            fields.append(f"prompt_tokens={context.prompt_tokens} cached_tokens={context.cached_tokens}")
            fields.append(f"completion_tokens={context.completion_tokens}")
            fields.append(f"finished={','.join(context.finish_reasons[:8])}")
        if context.client_id:
            fields.append(f"client_id={context.client_id}")
        logger.info(" ".join(fields))
