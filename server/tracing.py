"""OpenTelemetry traces: one span for each HTTP request, sent to a collector over OTLP/HTTP (`--otlp-traces-endpoint`).

The span is made when the request is over, with the times at which things happened: nothing is done for it on the way,
and without the flag nothing of OpenTelemetry's SDK is imported. Names are those of the GenAI semantic conventions
(github.com/open-telemetry/semantic-conventions-genai, `gen_ai.client.inference` seen from the server) and of those for
HTTP servers; what they have no name for begins with `intarsia.`. The trace continues the client's (`traceparent`), or
begins here. Sampling, the service's name, headers for the collector: OTEL_* environment variables, as the SDK reads
them. Never content, and no more of a client's words than the model that it asked for.
"""

from __future__ import annotations

import threading
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from server.request_context import RequestContext

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/responses": "chat",
}
_FLUSH_SECONDS = 2.0
_PROVIDER = "intarsia"


def is_installed() -> bool:
    """Whether the extra `otel` is."""
    try:
        return (
            find_spec("opentelemetry.sdk") is not None
            and find_spec("opentelemetry.exporter.otlp.proto.http") is not None
        )
    except ModuleNotFoundError:
        return False


class Tracing:
    """`exporter`: where finished spans go. They are sent by a thread of the SDK's; what a collector does not take in
    time is dropped."""

    def __init__(self, exporter: SpanExporter, *, version: str, host: str, port: int) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # A service name or attributes from the environment win over ours.
        resource = Resource({"service.name": "intarsia", "service.version": version}).merge(_from_environment())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("intarsia", version)
        self._propagator = TraceContextTextMapPropagator()
        self._kind, self._error = SpanKind.SERVER, StatusCode.ERROR
        self._server: dict[str, Any] = {"server.address": host, "server.port": port}

    @classmethod
    def to(cls, endpoint: str, **options: Any) -> Tracing:
        """`endpoint`: the collector's URL, path included."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return cls(OTLPSpanExporter(endpoint=endpoint), **options)

    def record(self, context: RequestContext, *, method: str, route: str, headers: dict[str, str]) -> None:
        """The request is over. `route`: its path as declared, or "". `headers`: those of the trace context."""
        end = time.time_ns()
        start = end - int((time.monotonic() - context.started) * 1e9)
        operation = _OPERATIONS.get(route)
        span = self._tracer.start_span(
            f"{operation} {context.model}"
            if operation and context.model
            else operation or f"{method} {route}".rstrip(),
            context=self._propagator.extract(headers),
            kind=self._kind,
            attributes={**self._server, **_http(context, method, route), **_gen_ai(context, operation)},
            start_time=start,
        )
        if span.is_recording():
            for name, seconds in _events(context):
                span.add_event(name, timestamp=start + int(seconds * 1e9))
            if context.status >= 500:
                span.set_status(self._error)
        span.end(end)

    def flush(self) -> None:
        """Sends what has not been sent, if the collector takes it soon. Blocks."""
        # The SDK's own limit of time is none: it tries for as long as the exporter does.
        thread = threading.Thread(target=self._provider.force_flush, name="traces", daemon=True)
        thread.start()
        thread.join(_FLUSH_SECONDS)


def _from_environment() -> Any:
    from opentelemetry.sdk.resources import OTELResourceDetector

    return OTELResourceDetector().detect()


def _events(context: RequestContext) -> list[tuple[str, float]]:
    """What happened when, seconds after the request's arrival."""
    events, token = [], context.first_token
    if context.first_slot is not None:
        # By the runner's clock: what it says of its queue must not lie behind what we have seen of it.
        events.append(("first_slot", context.first_slot if token is None else min(context.first_slot, token)))
    if token is not None:
        events.append(("first_token", token))
    return events


def _http(context: RequestContext, method: str, route: str) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "http.request.method": method,
        "http.response.status_code": context.status,
        "intarsia.request.id": context.id,
    }
    if route:
        attributes["http.route"] = route
    if context.error is not None or context.cut is not None or context.status >= 500:
        attributes["error.type"] = context.error or context.cut or str(context.status)
    return attributes


def _gen_ai(context: RequestContext, operation: str | None) -> dict[str, Any]:
    if operation is None:
        return {}
    attributes: dict[str, Any] = {"gen_ai.operation.name": operation, "gen_ai.provider.name": _PROVIDER}
    if context.model:
        attributes |= {"gen_ai.request.model": context.model, "gen_ai.response.model": context.model}
    if context.answer_id:
        attributes["gen_ai.response.id"] = context.answer_id
    if context.sampling is not None:
        attributes |= _request(context)
    if context.finish_reasons:
        attributes |= {
            "gen_ai.response.finish_reasons": context.finish_reasons,
            "gen_ai.usage.input_tokens": context.prompt_tokens,
            "gen_ai.usage.output_tokens": context.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": context.cached_tokens,
        }
    if context.first_slot is not None:
        attributes["intarsia.queue_seconds"] = context.queue_seconds
    if context.first_token is not None:
        name = "gen_ai.response.time_to_first_chunk" if context.stream else "intarsia.time_to_first_token"
        attributes[name] = context.first_token
    return attributes


def _request(context: RequestContext) -> dict[str, Any]:
    sampling = context.sampling
    assert sampling is not None  # noqa: S101 - the caller has looked
    attributes: dict[str, Any] = {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.stream": context.stream,
    }
    if sampling.top_k:
        attributes["gen_ai.request.top_k"] = sampling.top_k
    if context.choices != 1:
        attributes["gen_ai.request.choice.count"] = context.choices
    return attributes
