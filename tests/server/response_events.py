"""What tests of the Responses API have in common: a request sent whole and streamed, every body and every event checked
with the openai package's own types, and the events held against the sequence that OpenAI documents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from server.chat_template import ChatTemplate
from server.services import Services
from server.tools.styles import TOOL_STYLES
from tests.server.fakes import Api, FakeEngine, Script, services, tokenizer
from tests.server.test_chat_tools import LONG_MODEL, TEMPLATE

ROUTE = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
VARIES = {"id", "call_id", "created_at", "completed_at"}
"""Members that differ between two answers to the same request."""


def given_services(engine: FakeEngine, style: str | None = "hermes", **changes: Any) -> Services:
    return services(
        engine,
        **{
            "chat_template": ChatTemplate(tokenizer(), TEMPLATE),
            "model": LONG_MODEL,
            "tool_style": None if style is None else TOOL_STYLES[style],
            **changes,
        },
    )


def check_response(body: dict[str, Any]) -> dict[str, Any]:
    Response.model_validate(body, strict=True)
    return body


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Named as their data says, numbered from 0, each of a type that the openai package knows; nothing else is sent."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *blocks, end = response.text.split("\n\n")
    assert end == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        parsed = EVENT.validate_python(event)
        assert type(parsed).model_fields["type"].annotation.__args__ == (event["type"],)
        missing = {key for key, field in type(parsed).model_fields.items() if field.is_required()} - event.keys()
        assert not missing, (event["type"], missing)
        if "response" in event:
            check_response(event["response"])
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def put_together(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output that the events tell of, made from nothing but the deltas; what the `done` events say must agree."""
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    for event in events[:2]:
        assert (event["response"]["status"], event["response"]["output"]) == ("in_progress", [])
    rest = iter(events[2:-1])
    items: list[dict[str, Any]] = []
    for event in rest:
        assert event["type"] == "response.output_item.added"
        assert event["output_index"] == len(items)
        items.append(_put_item_together(event["item"], len(items), rest))
    return items


def _put_item_together(item: dict[str, Any], index: int, events: Iterator[dict[str, Any]]) -> dict[str, Any]:
    assert item["status"] == "in_progress"
    if item["type"] == "function_call":
        assert item["arguments"] == ""
        done = _put_call_together(item, index, events)
    else:
        assert item["content"] == []
        done = _put_text_together(item, index, events)
    assert done["type"] == "response.output_item.done"
    assert done["output_index"] == index
    assert done["item"] == {**item, "status": done["item"]["status"]}
    return done["item"]  # type: ignore[no-any-return]


def _put_call_together(item: dict[str, Any], index: int, events: Iterator[dict[str, Any]]) -> dict[str, Any]:
    for event in events:
        assert (event["item_id"], event["output_index"]) == (item["id"], index)
        if event["type"] != "response.function_call_arguments.delta":
            break
        item["arguments"] += event["delta"]
    assert event["type"] == "response.function_call_arguments.done"
    assert (event["arguments"], event["name"]) == (item["arguments"], item["name"])
    return next(events)


def _put_text_together(item: dict[str, Any], index: int, events: Iterator[dict[str, Any]]) -> dict[str, Any]:
    kind = "output_text" if item["type"] == "message" else "reasoning_text"
    place = (item["id"], index, 0)
    added = next(events)
    assert added["type"] == "response.content_part.added"
    part = added["part"]
    empty = {"type": kind, "text": ""}
    assert part == (empty | {"annotations": [], "logprobs": []} if kind == "output_text" else empty)
    for event in events:
        assert (event["item_id"], event["output_index"], event["content_index"]) == place
        if event["type"] != f"response.{kind}.delta":
            break
        part["text"] += event["delta"]
        part.get("logprobs", []).extend(event.get("logprobs", []))
    assert event["type"] == f"response.{kind}.done"
    assert (event["text"], event.get("logprobs", [])) == (part["text"], part.get("logprobs", []))
    done = next(events)
    assert done["type"] == "response.content_part.done"
    assert (done["item_id"], done["output_index"], done["content_index"]) == place
    assert done["part"] == part
    item["content"] = [part]
    return next(events)


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_ids(each) for key, each in value.items() if key not in VARIES}
    return [without_ids(each) for each in value] if isinstance(value, list) else value


def respond(script: Script, body: dict[str, Any], *, per_event: int = 1, **changes: Any) -> dict[str, Any]:
    """A whole response, after it has been compared with the streamed one."""
    engine = FakeEngine(script, tokens_per_event=per_event)
    client = Api(given_services(engine, **changes))
    body = {"input": "hello", **body}
    response = client.post(ROUTE, body)
    assert response.status_code == 200, response.text
    whole = check_response(response.json())
    events = events_of(client.post(ROUTE, {**body, "stream": True}))
    last = events[-1]
    assert last["type"] == f"response.{whole['status']}"
    assert put_together(events) == last["response"]["output"]
    assert without_ids(last["response"]) == without_ids(whole)
    ids = [item["id"] for item in whole["output"]]
    assert len(set(ids)) == len(ids)
    # Everything that the request asked for is told from the beginning.
    changing = ("status", "output", "usage", "completed_at", "incomplete_details")
    assert {**last["response"], **dict.fromkeys(changing)} == {**events[0]["response"], **dict.fromkeys(changing)}
    return whole
