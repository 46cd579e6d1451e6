"""The outermost middleware: gives each request its id, and when it is over writes one line about it, counts it, traces
it and closes what its route left open. It is also where an exception that nobody expected ends.

The line holds ids, sizes and times. Never content: not the body, not the query, not even the path of an unknown route.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.answer_pieces import pieces_of
from server.delivery import DELIVERY, Cut, Delivery, Unwatched
from server.errors import InternalError, log_exception
from server.gate import OPERATOR_PATHS
from server.log_format import Pairs
from server.metrics import Metrics
from server.request_context import RequestContext, current_request, new_request_id
from server.route_paths import RoutePaths
from server.tracing import Tracing

logger = logging.getLogger("intarsia.request")

_CLIENT_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_MAX_REASONS = 8
_TRACE_HEADERS = ("traceparent", "tracestate")


class RequestLog:
    """`paths`: of the routes. `key_names`: of the API keys, by their numbers. `tracing`: None where there is none."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        paths: RoutePaths,
        key_names: Sequence[str] = (),
        tracing: Tracing | None = None,
    ) -> None:
        self._app = app
        self._paths = paths
        self._metrics = metrics
        self._key_names = key_names
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client_id = Headers(scope=scope).get("x-request-id", "")
        context = RequestContext(new_request_id(), client_id if _CLIENT_ID.fullmatch(client_id) else "")
        answer = _WatchedSend(context, scope, send)
        token = current_request.set(context)
        cut = None
        try:
            await self._app(scope, receive, answer.send)
        except asyncio.CancelledError:
            cut = Cut.SHUTDOWN
            raise
        except Exception as error:
            log_exception(error)
            failure = InternalError()
            if not context.status:
                await failure.response()(scope, receive, answer.send)
            elif not context.complete:
                # Returning cuts the connection: a client must not take half of an answer for the whole.
                failure.note()
                cut = Cut.FAULT
        finally:
            current_request.reset(token)
            context.end()
            answer.end(cut)
            self._finish(scope, context)

    def _finish(self, scope: Scope, context: RequestContext) -> None:
        if scope["path"] in OPERATOR_PATHS and context.status in (200, 503):
            return  # Probes and scrapes come every few seconds and would drown the rest.
        self._count(context)
        # Without a route: a layer around the router has answered, or there is none.
        route = getattr(scope.get("route"), "path", "") or self._paths.of(scope["path"])
        if logger.isEnabledFor(logging.INFO):
            fields = self._fields(context, scope["method"], route)
            logger.info("%s", Pairs(fields), extra={"fields": fields})
        if self._tracing is not None:
            headers = Headers(scope=scope)
            given = {name: headers[name] for name in _TRACE_HEADERS if name in headers}
            self._tracing.record(context, method=scope["method"], route=route, headers=given)

    def _count(self, context: RequestContext) -> None:
        self._metrics.count_response(context.status)
        if context.error is not None:
            self._metrics.count_error(context.error)
        if context.decode_seconds:
            self._metrics.embedding_decode_time.observe(context.decode_seconds)

    def _fields(self, context: RequestContext, method: str, route: str) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "id": context.id,
            "route": route or "unknown",
            "method": method,
            "status": context.status,
            "ms": _milliseconds(time.monotonic() - context.started),
        }
        if context.cut is not None:
            fields["cut"] = context.cut.value
            if context.sent_status:
                fields["sent_status"] = context.sent_status
        if context.error is not None:
            fields["error"] = context.error
        if context.decode_seconds:
            fields["decode_ms"] = _milliseconds(context.decode_seconds)
        if context.first_slot is not None:
            fields["queue_ms"] = _milliseconds(context.queue_seconds)
        if context.first_token is not None:
            fields["ttft_ms"] = _milliseconds(context.first_token)
        if context.finish_reasons:
            fields["prompt_tokens"] = context.prompt_tokens
            fields["cached_tokens"] = context.cached_tokens
            fields["completion_tokens"] = context.completion_tokens
            fields["finished"] = context.finish_reasons[:_MAX_REASONS]
        if context.api_key is not None and context.api_key < len(self._key_names):
            fields["key"] = self._key_names[context.api_key]
        if context.client_id:
            fields["client_id"] = context.client_id
        return fields


class _WatchedSend:
    """The `send` of one request: adds headers, hands large answers on in pieces, and sees what becomes of them."""

    def __init__(self, context: RequestContext, scope: Scope, send: Send) -> None:
        self._context, self._scope, self._send = context, scope, send
        self._delivery: Delivery = scope.get("extensions", {}).get(DELIVERY) or Unwatched()
        self._cut: Cut | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._start(message)
            return
        for piece in pieces_of(message, self._scope):
            await self._pass_on(piece)
            if self._cut is None and not piece.get("more_body", False):
                self._cut = await self._delivery.sent()
                self._context.complete = self._cut is None

    def end(self, cut: Cut | None) -> None:
        """Nothing more comes. `cut`: why, unless the connection knows better."""
        if not self._context.complete:
            self._context.note_cut(self._cut or self._delivery.cut or cut or Cut.CLIENT_LEFT)

    async def _start(self, message: Message) -> None:
        headers = MutableHeaders(scope=message)
        headers["x-request-id"] = self._context.id
        headers.setdefault("cache-control", "no-store")  # Answers hold what clients have written.
        await self._pass_on(message)
        if self._cut is None:
            self._context.status = message["status"]

    async def _pass_on(self, message: Message) -> None:
        """Also what nobody reads any more: a server misses the end of an answer that it has not been given."""
        self._cut = self._cut or self._delivery.cut
        try:
            await self._send(message)
        except OSError:  # what other servers raise then
            self._cut = self._cut or Cut.CLIENT_LEFT
        self._cut = self._cut or self._delivery.cut


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 1)
