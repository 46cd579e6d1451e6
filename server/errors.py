"""Every error that a client can see, and the one place where an exception becomes an HTTP response.

Code raises one of these where it understands what went wrong; `install_error_handlers` turns it, and everything that
the framework itself raises, into OpenAI's body: `{"error": {"message", "type", "param", "code"}}`. A stream that has
begun sends the same body as its last event (`APIError.body`).

Messages are for the client: they name the field and the limit, never a file, an address or content, and are cut at
`MAX_MESSAGE_BYTES`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from server.request_context import current_request

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 4096
_MAX_PARAM_CHARS = 200
_METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
_MAX_REPORTED = 5
"""A list of a thousand wrong items gives a thousand validation errors: only the first are told."""

ERROR_CODES = (
    "body_too_large",
    "context_length_exceeded",
    "engine_failed",
    "generation_failed",
    "headers_too_large",
    "invalid_api_key",
    "invalid_http",
    "invalid_image",
    "invalid_json",
    "invalid_multipart",
    "invalid_value",
    "method_not_allowed",
    "model_not_found",
    "not_found",
    "not_running",
    "overloaded",
    "previous_response_not_found",
    "prompt_embeds_not_found",
    "rate_limit_exceeded",
    "request_aborted",
    "timeout",
    "unknown_parameter",
    "unsupported_media_type",
    "unsupported_parameter",
)
"""Every `code` that is ever told; the metrics count by them."""

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"


class APIError(Exception):
    """An error with an HTTP status and OpenAI's body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.message = bounded(message, MAX_MESSAGE_BYTES)
        self.type = type
        self.param = None if param is None else bounded(param, _MAX_PARAM_CHARS)
        self.code = code
        self.headers = dict(headers or {})
        super().__init__(self.message)

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def note(self) -> None:
        """For the request's log line and the metrics: this is what its client is told."""
        context = current_request.get()
        if context is not None:
            context.error = self.code or self.type

    def response(self) -> Response:
        self.note()
        return Response(json.dumps(self.body()), self.status, self.headers, "application/json")


class InvalidRequest(APIError):
    def __init__(self, message: str, *, param: str | None = None, code: str | None = "invalid_value") -> None:
        super().__init__(400, message, param=param, code=code)


class ContextLengthExceeded(InvalidRequest):
    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class UnsupportedParameter(InvalidRequest):
    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="unsupported_parameter")


class Unauthorized(APIError):
    def __init__(self, message: str) -> None:
        super().__init__(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


class ModelNotFound(APIError):
    def __init__(self, message: str, *, param: str | None = "model") -> None:
        super().__init__(404, message, param=param, code="model_not_found")


class BodyTooLarge(APIError):
    def __init__(self, message: str) -> None:
        super().__init__(413, message, code="body_too_large")


class UnsupportedMediaType(APIError):
    def __init__(self, message: str) -> None:
        super().__init__(415, message, code="unsupported_media_type")


class QueueFull(APIError):
    """The runner's queue has no room: the client should come back in `retry_after` seconds."""

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        code = "rate_limit_exceeded"
        super().__init__(429, message, type=code, code=code, headers={"Retry-After": str(retry_after)})


class Unavailable(APIError):
    """The server takes no requests now: loading, draining, or out of touch with its runner."""

    def __init__(self, message: str, *, retry_after: int = 5) -> None:
        super().__init__(503, message, type=SERVER_ERROR, code="overloaded", headers={"Retry-After": str(retry_after)})


class RequestTimeout(APIError):
    """The answer took longer than the server allows. The client's library is told not to ask for the same again."""

    def __init__(self, seconds: float) -> None:
        message = f"The request took longer than the {seconds:g} s that this server allows."
        super().__init__(504, message, type=SERVER_ERROR, code="timeout", headers={"x-should-retry": "false"})


ENGINE_STOPPED = "The engine stopped before the request was finished."


class EngineFailed(APIError):
    """The runner died with the request in it. 503, not 500: the request was fine and may be sent again elsewhere."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(503, message or ENGINE_STOPPED, type=SERVER_ERROR, code="engine_failed")


class RequestAborted(APIError):
    """Somebody has ended the answer through /abort. 499: no client library sends the request again by itself."""

    def __init__(self) -> None:
        super().__init__(499, "The request was aborted.", code="request_aborted")


class InternalError(APIError):
    """A fault of ours. Says nothing: the log has it."""

    def __init__(self) -> None:
        super().__init__(500, "The server had an error while processing the request.", type=SERVER_ERROR)


def bounded(text: str, limit: int) -> str:
    """`text` as at most `limit` bytes of UTF-8; a lone surrogate (JSON can carry one) becomes `?`."""
    return text[:limit].encode("utf-8", "replace")[:limit].decode("utf-8", "ignore")


def log_exception(error: BaseException) -> None:
    """Log what failed and where, but not the exception's own text: it may quote a prompt."""
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    logger.error("unexpected %s\n%s", name, "".join(_frames(error.__traceback__)))


def install_error_handlers(app: FastAPI) -> None:
    """Make every error response of `app` one in OpenAI's shape."""
    app.add_exception_handler(APIError, _api_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(MemoryError, _no_memory)
    app.add_exception_handler(Exception, _unexpected)


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)  # noqa: S101 - the framework's signature is wider than what it passes
    return error.response()


async def _http_exception(request: Request, error: Exception) -> Response:
    """What the framework raises by itself: unknown routes, wrong methods, bodies that it cannot parse."""
    assert isinstance(error, HTTPException)  # noqa: S101
    message, code, headers = str(error.detail), None, dict(error.headers or {})
    method, path = bounded(request.method, 20), bounded(request.url.path, 200)
    if error.status_code == 404:
        message, code = f"There is no route {method} {path} here.", "not_found"
    elif error.status_code == 405:
        headers["Allow"] = ", ".join(_methods(request))
        message, code = f"{path} takes {headers['Allow']}, not {method}.", "method_not_allowed"
    kind = SERVER_ERROR if error.status_code >= 500 else INVALID_REQUEST
    return APIError(error.status_code, message, type=kind, code=code, headers=headers).response()


def _methods(request: Request) -> Sequence[str]:
    """What may be asked of the request's path. The framework's own answer is that of one of its routes, or none."""
    scopes = {method: {**request.scope, "method": method} for method in _METHODS}
    routes = request.app.routes
    return [name for name, scope in scopes.items() if any(route.matches(scope)[0] is Match.FULL for route in routes)]


async def _validation_error(_: Request, error: Exception) -> Response:
    """400 instead of the framework's 422, naming fields and reasons but never the values that came."""
    assert isinstance(error, RequestValidationError)  # noqa: S101
    return validation_error(error.errors()).response()


async def _no_memory(_: Request, error: Exception) -> Response:
    """What a request has made is gone with it: the next one, or the same again, may find room."""
    logger.warning("There was no memory for a request.")
    return Unavailable("The server has no memory for this request.", retry_after=1).response()


async def _unexpected(_: Request, error: Exception) -> Response:
    log_exception(error)
    return InternalError().response()


def validation_error(errors: Sequence[Mapping[str, Any]]) -> InvalidRequest:
    """Pydantic's errors as one 400; `param` is the first one's field."""
    if not errors:
        return InvalidRequest("The request is not valid.")
    if errors[0].get("type") == "json_invalid":
        return InvalidRequest("The body is not valid JSON.", code="invalid_json")
    told = [_sentence(error) for error in errors[:_MAX_REPORTED]]
    if len(errors) > _MAX_REPORTED:
        told.append(f"and {len(errors) - _MAX_REPORTED} more")
    return InvalidRequest("; ".join(told), param=_field(errors[0].get("loc", ())) or None)


def _sentence(error: Mapping[str, Any]) -> str:
    field, message = _field(error.get("loc", ())), bounded(str(error.get("msg", "not valid")), 400)
    return f"{field}: {message}" if field else message


_TYPE_TAGS = frozenset({"str", "int", "float", "bool", "bytes", "list", "dict", "none"})


def _field(location: Sequence[str | int]) -> str:
    """`("body", "messages", 0, "content", "str")` as `messages.0.content`: without the tags of pydantic's unions."""
    parts: list[str] = []
    for part in location[1:] if location and location[0] in ("body", "query", "path", "header") else location:
        name = str(part)
        if isinstance(part, str) and (name in _TYPE_TAGS or not name.isidentifier()):
            break
        parts.append(name[:_MAX_PARAM_CHARS])
    return bounded(".".join(parts[:8]), _MAX_PARAM_CHARS)


def _frames(traceback: TracebackType | None) -> Sequence[str]:
    import traceback as tracebacks

    return tracebacks.format_tb(traceback, limit=-30)
