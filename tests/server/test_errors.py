"""How errors look to a client: OpenAI's body, whatever went wrong, and nothing that is not theirs to know."""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

import pytest
from fastapi import APIRouter, FastAPI
from pydantic import BaseModel, Field
from starlette.testclient import TestClient

from server.errors import (
    MAX_MESSAGE_BYTES,
    APIError,
    BodyTooLarge,
    ContextLengthExceeded,
    EngineFailed,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    QueueFull,
    Unauthorized,
    Unavailable,
    UnsupportedMediaType,
    UnsupportedParameter,
    bounded,
    install_error_handlers,
)
from server.request_log import RequestLog
from server.route_paths import RoutePaths
from tests.server.fakes import metrics


class Part(BaseModel):
    kind: Literal["text"]


class Body(BaseModel):
    prompt: str | list[int] | list[list[int]]
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    parts: list[Part] = []


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()
    install_error_handlers(app)
    app.add_middleware(RequestLog, metrics=metrics(), paths=RoutePaths(()))

    @app.post("/validate")
    async def validate(body: Body) -> None: ...

    @app.get("/api-error")
    async def api_error() -> None:
        raise QueueFull("full", retry_after=7)

    @app.get("/crash")
    async def crash(prompt: str) -> None:
        raise RuntimeError(prompt)

    return TestClient(app, raise_server_exceptions=False)


def error_of(answer: Any) -> dict[str, Any]:
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


def test_an_api_error_with_its_headers(client: TestClient) -> None:
    answer = client.get("/api-error")
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "7"
    assert answer.headers["content-type"] == "application/json"
    assert error_of(answer) == {
        "message": "full",
        "type": "rate_limit_exceeded",
        "param": None,
        "code": "rate_limit_exceeded",
    }


def test_a_crash_says_nothing(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        answer = client.get("/crash?prompt=secret")
    assert answer.status_code == 500
    assert error_of(answer)["type"] == "server_error"
    assert "x-request-id" in answer.headers
    assert "RuntimeError" in caplog.text
    assert "in crash" in caplog.text  # Where it happened,
    assert "secret" not in caplog.text + answer.text  # but not with which words.


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "x", "temperature": 3}, "temperature"),
        ({"prompt": "x", "parts": [{"kind": "text"}, {"kind": "image"}]}, "parts.1.kind"),
        ({"prompt": ["x"] * 10_000}, "prompt"),
    ],
)
def test_what_is_not_valid_is_named(client: TestClient, body: dict[str, Any], param: str) -> None:
    answer = client.post("/validate", json=body)
    assert answer.status_code == 400
    error = error_of(answer)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param in error["message"]
    assert len(answer.content) < 2 * MAX_MESSAGE_BYTES


@pytest.mark.parametrize(
    "content",
    [b'{"prompt": NaN}', b'{"prompt": "\\ud800", "temperature": "\\ud800"}', b"{", b"", b"[]", b"\xff", b"[" * 100_000],
)
def test_what_is_not_json_is_a_400(client: TestClient, content: bytes) -> None:
    answer = client.post("/validate", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    error_of(answer)


def test_values_are_not_echoed(client: TestClient) -> None:
    answer = client.post("/validate", json={"prompt": "x", "temperature": "my secret"})
    assert "secret" not in answer.text


def test_unknown_routes_and_methods(client: TestClient) -> None:
    answer = client.get("/" + "x" * 5000)
    assert answer.status_code == 404
    assert len(error_of(answer)["message"]) < 300
    answer = client.get("/validate")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    assert error_of(answer)["code"] == "method_not_allowed"
    assert error_of(answer)["message"] == "/validate takes POST, not GET."


def test_every_method_of_a_path_is_allowed(client: TestClient) -> None:
    """RFC 9110, 15.5.6: Allow lists all of them, also where they are several routes."""
    for method in ("GET", "DELETE"):
        router = APIRouter()
        router.add_api_route("/both/{name}", lambda: None, methods=[method])
        client.app.include_router(router)  # type: ignore[attr-defined]
    answer = client.post("/both/x")
    assert (answer.status_code, answer.headers["allow"]) == (405, "DELETE, GET")
    assert error_of(answer)["message"] == "/both/x takes DELETE, GET, not POST."


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (InvalidRequest("m"), 400, "invalid_request_error", "invalid_value"),
        (ContextLengthExceeded("m"), 400, "invalid_request_error", "context_length_exceeded"),
        (UnsupportedParameter("m"), 400, "invalid_request_error", "unsupported_parameter"),
        (Unauthorized("m"), 401, "invalid_request_error", "invalid_api_key"),
        (ModelNotFound("m"), 404, "invalid_request_error", "model_not_found"),
        (BodyTooLarge("m"), 413, "invalid_request_error", "body_too_large"),
        (UnsupportedMediaType("m"), 415, "invalid_request_error", "unsupported_media_type"),
        (QueueFull("m"), 429, "rate_limit_exceeded", "rate_limit_exceeded"),
        (InternalError(), 500, "server_error", None),
        (Unavailable("m"), 503, "server_error", "overloaded"),
        (EngineFailed(), 503, "server_error", "engine_failed"),
    ],
)
def test_statuses_and_codes(error: APIError, status: int, kind: str, code: str | None) -> None:
    assert (error.status, error.type, error.code) == (status, kind, code)
    assert ("Retry-After" in error.headers) == isinstance(error, QueueFull | Unavailable)


@pytest.mark.parametrize("text", ["x" * 10_000, "é" * 10_000, "\ud800" * 10_000, "a\ud800b", "ok"])
def test_messages_are_bounded_and_encodable(text: str) -> None:
    message = APIError(400, text).message
    assert len(message.encode()) <= MAX_MESSAGE_BYTES
    assert bounded("é", 1) == ""
