"""Tools and reasoning through real processes and OpenAI's own client: the flags, the template, the parsers, the wire.

The runner is scripted, and echoes: the template makes the prompt of the question alone, so the answer is what was
asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from tests.models import Family
from tests.server.harness import ServerProcess
from tests.server.scripted_runner import Script

ECHO = "{% if tools %}{% endif %}{{ messages[0].content }}{# <tool_call> </think> #}"
TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
TEXT = (
    "<think>Two cities, two calls.</think>Let me see.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln \\"am\\" Rhein"}}\n</tool_call>'
)
CITIES = ["Paris", 'Köln "am" Rhein']


@pytest.fixture(scope="module")
def llama(tiny_model: Callable[[Family], Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def client(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    script = Script(model=str(llama))
    with (
        ServerProcess(script, tmp_path_factory.mktemp("server"), chat_template=ECHO) as server,
        openai.OpenAI(base_url=f"{server.wait_ready().base}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def ask(llama: Path) -> dict[str, Any]:
    length = len(AutoTokenizer.from_pretrained(llama)(TEXT)["input_ids"])
    question: Any = [{"role": "user", "content": TEXT}]
    return {"model": "scripted", "messages": question, "tools": TOOLS, "max_tokens": length}


def check(message: Any) -> None:
    assert [json.loads(call.function.arguments)["city"] for call in message.tool_calls] == CITIES
    assert (message.content, message.reasoning_content) == ("Let me see.", "Two cities, two calls.")


def test_a_whole_answer(client: openai.OpenAI, llama: Path) -> None:
    answer = client.chat.completions.create(**ask(llama))
    check(answer.choices[0].message)
    details = answer.usage and answer.usage.completion_tokens_details
    assert details is not None
    assert details.reasoning_tokens is not None
    assert 0 < details.reasoning_tokens < answer.usage.completion_tokens


def test_a_stream(client: openai.OpenAI, llama: Path) -> None:
    calls: dict[int, list[str]] = {}
    content = reasoning = ""
    for chunk in client.chat.completions.create(**ask(llama), stream=True):
        delta: Any = chunk.choices[0].delta
        content += delta.content or ""
        reasoning += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or []:
            calls.setdefault(call.index, []).append(call.function.arguments)
    assert [json.loads("".join(pieces))["city"] for pieces in calls.values()] == CITIES
    assert all(len(pieces) > 2 for pieces in calls.values())  # as they come
    assert (content, reasoning) == ("Let me see.", "Two cities, two calls.")


def test_what_is_refused(client: openai.OpenAI, llama: Path) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{**ask(llama), "tools": [{"type": "function", "function": {"name": "a b"}}]})
    assert caught.value.param == "tools[0].function.name"
