"""Calls that are demanded of a real model, through OpenAI's own client: by itself a random one would never make any."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.integration.real_server import RealServer
from tests.server.harness import eventually

TEMPLATE = "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{{ messages[-1].content }}"
PARAMETERS = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["unit", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
CLOCK: Any = {"type": "function", "function": {"name": "clock", "parameters": NOTHING}}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


class Forecast(BaseModel):
    """A forecast."""

    place: Literal["Oslo", "Köln"]
    days: Annotated[int, Field(ge=1, le=9)]
    hourly: bool | None


@pytest.fixture(scope="module")
def tool_server(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("tools")
    options: dict[str, Any] = {"chat_template": TEMPLATE, "tool_call_parser": "hermes"}
    with RealServer(
        folder, llama, dtype="float32", debug_checks=True, async_scheduling=True, max_num_seqs=4, **options
    ) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def client(tool_server: RealServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tool_server.base}/v1", api_key="none", max_retries=0) as client:
        yield client


def asked(**fields: Any) -> dict[str, Any]:
    question = [{"role": "user", "content": "The weather in Oslo?"}]
    return {"model": "m", "messages": question, "tools": [WEATHER, CLOCK], "max_tokens": 300, **fields}


def check(call: Any) -> None:
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        assert arguments["unit"] in ("C", "F") and 1 <= arguments["days"] <= 99 and len(arguments) == 2
    else:
        assert (call.function.name, arguments) == ("clock", {})


def test_required(tool_server: RealServer, client: openai.OpenAI) -> None:
    def ask(seed: int) -> Any:
        body = asked(tool_choice="required", seed=seed, parallel_tool_calls=seed > 5, n=1 + seed % 2)
        return client.chat.completions.create(**body)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    choices = [choice for answer in answers for choice in answer.choices]
    assert {choice.finish_reason for choice in choices} <= {"tool_calls", "length"}
    whole = [choice for choice in choices if choice.finish_reason == "tool_calls"]
    assert len(whole) > 6
    for choice in whole:
        assert choice.message.content is None
        for call in choice.message.tool_calls:
            check(call)
    assert len({call.function.name for choice in whole for call in choice.message.tool_calls}) == 2
    eventually(tool_server.is_idle, 10)


def test_named_and_streamed(client: openai.OpenAI) -> None:
    body = asked(tool_choice=NAMED, seed=3, parallel_tool_calls=False)
    (whole,) = client.chat.completions.create(**body).choices
    assert whole.finish_reason == "stop" and whole.message.tool_calls is not None
    with client.chat.completions.stream(**body) as stream:
        (streamed,) = stream.get_final_completion().choices
    assert streamed.finish_reason == "stop" and streamed.message.tool_calls is not None
    (call,), (same,) = whole.message.tool_calls, streamed.message.tool_calls
    check(call)
    assert call.type == "function" and call.function.name == "weather"
    assert same.function.arguments == call.function.arguments


def test_openai_s_own_tool(client: openai.OpenAI) -> None:
    """Strict by default; its arguments come back as an instance."""
    forecast = openai.pydantic_function_tool(Forecast)
    body = asked(tools=[forecast], tool_choice="required", seed=1, parallel_tool_calls=False)
    (choice,) = client.chat.completions.parse(**body).choices
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
    assert isinstance(choice.message.tool_calls[0].function.parsed_arguments, Forecast)
    # Strict and free to call or not: a random model does not.
    (choice,) = client.chat.completions.create(**asked(tools=[forecast], seed=1, max_tokens=20)).choices
    assert choice.finish_reason == "length" and choice.message.tool_calls is None


def test_what_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**asked(response_format={"type": "json_object"}))
    assert (caught.value.param, caught.value.code) == ("response_format", "unsupported_parameter")
