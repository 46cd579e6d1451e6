"""/openapi.json with typed bodies and OpenAI's errors. The routes read and check their bodies themselves, so the
framework knows nothing of them: `json_body` tells it, `install_openapi` adds what the bodies refer to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from server.embeddings_schema import EmbeddingRequest, TokenEmbeddingsRequest
from server.responses.schema import ResponseRequest
from server.schemas import AbortRequest, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

BODIES: tuple[type[BaseModel], ...] = (
    CompletionRequest,
    ChatRequest,
    ResponseRequest,
    EmbeddingRequest,
    TokenEmbeddingsRequest,
    TokenizeRequest,
    DetokenizeRequest,
    AbortRequest,
)
"""Every schema that `json_body` is called with."""

_HELLO = [{"role": "user", "content": "Hello"}]
_EXAMPLES: dict[str, dict[str, Any]] = {
    "CompletionRequest": {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0},
    "ChatRequest": {"messages": _HELLO, "max_tokens": 8, "temperature": 0},
    "ResponseRequest": {"input": "Hello", "max_output_tokens": 8, "temperature": 0},
    "EmbeddingRequest": {"input": "The capital of France is Paris."},
    "TokenEmbeddingsRequest": {"input": "The capital of France is"},
    "TokenizeRequest": {"messages": _HELLO},
    "DetokenizeRequest": {"tokens": [5, 6, 7]},
    "AbortRequest": {"id": "cmpl-00000000000000000000000000000000"},
}
_REF = "#/components/schemas/{model}"
_EVENT = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
"""One server-sent event: a chunk in JSON, or [DONE]."""
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_FILE = {"type": "string", "format": "binary"}
_FORM = {"type": "object", "additionalProperties": _FILE}
"""Fields with tensor files."""
_ERROR_RESPONSE = {
    "description": "An error.",
    "content": {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}},
}


def json_body(
    schema: type[BaseModel], *, streams: bool = False, tensors: bool = False, raw: str = ""
) -> dict[str, Any]:
    """A route's `openapi_extra`. `streams`: it may also answer with server-sent events. `tensors`: it also takes
    multipart bodies. `raw`: the media type of bytes with which it may also answer."""
    ref = {"$ref": _REF.format(model=schema.__name__)}
    content: dict[str, Any] = {"application/json": {"schema": ref, "example": _EXAMPLES[schema.__name__]}}
    if tensors:
        properties = {"request": ref}
        content["multipart/form-data"] = {"schema": {**_FORM, "properties": properties, "required": ["request"]}}
    extra: dict[str, Any] = {"requestBody": {"required": True, "content": content}}
    if streams:
        extra["responses"] = {"200": {"content": {"text/event-stream": {"schema": _EVENT}}}}
    if raw:
        extra["responses"] = {"200": {"content": {raw: {"schema": {"type": "string", "format": "binary"}}}}}
    return extra


def upload_body() -> dict[str, Any]:
    """The `openapi_extra` of a route that takes one tensor file."""
    content = {
        "application/octet-stream": {"schema": _FILE},
        "multipart/form-data": {"schema": {**_FORM, "properties": {"request": {"type": "object"}}, "minProperties": 1}},
    }
    return {"requestBody": {"required": True, "content": content}}


def install_openapi(app: FastAPI, model_names: Sequence[str]) -> None:
    """Make `app.openapi()` complete. Called once, when all routes are there. `model_names`: what may be asked for."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _complete(generate(), model_names)
        return app.openapi_schema or {}

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(document: dict[str, Any], model_names: Sequence[str]) -> None:
    _, bodies = models_json_schema([(schema, "validation") for schema in BODIES], ref_template=_REF)
    components = document.setdefault("components", {}).setdefault("schemas", {})
    components.update(bodies["$defs"], Error=_ERROR)
    for schema in components.values():
        if "model" in schema.get("properties", ()):
            schema["properties"]["model"]["anyOf"][0]["enum"] = list(model_names)
    for name in ("HTTPValidationError", "ValidationError"):
        components.pop(name, None)
    for path in document["paths"].values():
        for operation in path.values():
            responses = operation["responses"]
            responses.pop("422", None)  # the framework's own; ours are 400
            responses.update({"4XX": _ERROR_RESPONSE, "5XX": _ERROR_RESPONSE})
