"""/openapi.json: every body is described, and the descriptions say what the routes do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from server.app import create_app
from server.config import ServerConfig
from server.engine_client import EngineClient
from server.errors import APIError
from server.lifecycle import Lifecycle
from server.metrics import Metrics
from server.openapi import BODIES
from server.responses.schema import ResponseRequest
from server.schemas import ChatRequest, CompletionRequest, parse


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    engine = EngineClient(Metrics("m"), tmp_path_factory.mktemp("sockets"))
    try:
        app = create_app(ServerConfig(served_model_name=("a", "b/c")), engine, Lifecycle(engine))
        assert app.openapi() is app.openapi()
        return app.openapi()
    finally:
        asyncio.run(engine.close())


WITHOUT_BODY = {"post /v1/responses/{response_id}/cancel"}
WITH_FILE = {"post /v1/prompt_embeds"}


def operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method} {path}", operation


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        yield from (value for key, value in node.items() if key == "$ref")
        node = list(node.values())
    if isinstance(node, list):
        for each in node:
            yield from references(each)


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    found = set(references(document))
    assert len(found) > 5
    for reference in found:
        node: Any = document
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]
        assert isinstance(node, dict)


def test_every_post_has_a_typed_body(document: dict[str, Any]) -> None:
    posts = {name: operation for name, operation in operations(document) if name.startswith("post ")}
    assert len(posts) >= 10
    assert {name for name in posts if "requestBody" not in posts[name]} == WITHOUT_BODY
    for name, operation in posts.items():
        if name in WITHOUT_BODY | WITH_FILE:
            continue
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        assert document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["type"] == "object", name


@pytest.mark.parametrize("schema", [CompletionRequest, ChatRequest, ResponseRequest])
def test_the_body_has_the_schemas_fields_and_limits(document: dict[str, Any], schema: type[BaseModel]) -> None:
    described = document["components"]["schemas"][schema.__name__]["properties"]
    assert set(described) == set(schema.model_fields)
    assert {"type": "number", "minimum": 0.0, "maximum": 2.0} in described["temperature"]["anyOf"]
    # Not one field is simply anything, those included that are checked by hand.
    assert all({"type", "anyOf", "$ref"} & set(each) for each in described.values())


def test_hidden_states_may_be_declined(document: dict[str, Any]) -> None:
    """By the values that the server takes, and no others."""
    schema = document["components"]["schemas"]["CompletionRequest"]["properties"]["return_hidden_states"]
    for value, mode in (("last", "last"), ("all", "all"), ("answer", "answer"), (False, None), (None, None)):
        Draft202012Validator(schema).validate(value)
        assert parse(CompletionRequest, {"return_hidden_states": value}).return_hidden_states == mode
    wrong: list[Any] = [True, 0, "first"]
    for each in wrong:
        assert not Draft202012Validator(schema).is_valid(each)
        with pytest.raises(APIError):
            parse(CompletionRequest, {"return_hidden_states": each})


def test_the_examples_are_valid_and_name_no_other_model(document: dict[str, Any]) -> None:
    schemas = {schema.__name__: schema for schema in BODIES}
    for name, operation in operations(document):
        if name.startswith("post ") and name not in WITHOUT_BODY | WITH_FILE:
            body = operation["requestBody"]["content"]["application/json"]
            parse(schemas[body["schema"]["$ref"].rpartition("/")[2]], body["example"])
    for schema in ("CompletionRequest", "ChatRequest", "ResponseRequest", "TokenizeRequest", "DetokenizeRequest"):
        (model, null) = document["components"]["schemas"][schema]["properties"]["model"]["anyOf"]
        assert (model, null) == ({"type": "string", "enum": ["a", "b/c"]}, {"type": "null"})


def test_errors_are_openais_and_nothing_else(document: dict[str, Any]) -> None:
    for name, operation in operations(document):
        assert "422" not in operation["responses"], name
        for status in ("4XX", "5XX"):
            schema = operation["responses"][status]["content"]["application/json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/Error"}
    assert "HTTPValidationError" not in document["components"]["schemas"]


def test_tensors_are_announced(document: dict[str, Any]) -> None:
    for route in ("/v1/completions", "/v1/chat/completions"):
        for path in (route, f"{route}/render"):
            content = document["paths"][path]["post"]["requestBody"]["content"]
            form = content["multipart/form-data"]["schema"]
            assert form["properties"]["request"] == content["application/json"]["schema"]
            assert form["additionalProperties"]["format"] == "binary"
    upload = document["paths"]["/v1/prompt_embeds"]["post"]["requestBody"]["content"]
    assert set(upload) == {"application/octet-stream", "multipart/form-data"}


def test_streams_are_announced(document: dict[str, Any]) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        assert set(content) == {"application/json", "text/event-stream"}


def test_prompts_and_messages_have_typed_parts(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    rows = {"type": "prompt_embeds", "data": "AAAA"}
    stored, field = ({"type": "prompt_embeds", name: "a"} for name in ("id", "part"))
    text, ids = {"type": "text", "text": "a"}, {"type": "token_ids", "token_ids": [5]}
    prompt = Draft202012Validator(schemas["CompletionRequest"]["properties"]["prompt"])
    for valid in ("a", ["a"], [5], [[5]], [text], [ids, rows, text], [[text], [5], [rows]], [stored, field], None):
        prompt.validate(valid)
    wrong: list[Any] = [
        [{}],
        [{"type": "text"}],
        [{"type": "prompt_embeds"}],
        [rows | {"id": "a"}],
        [text, "a"],
        [{"type": "x"}],
        5,
    ]
    for invalid in wrong:
        assert not prompt.is_valid(invalid)
    messages = Draft202012Validator(schemas["ChatRequest"]["properties"]["messages"])
    messages.validate([{"role": "user", "content": [text, rows, text]}])
    assert not messages.is_valid([{"role": "user", "content": [ids]}])
