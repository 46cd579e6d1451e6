"""instructor against the servers of `tests.compat`: its modes of structured output, whole and streamed.

python -m tests.compat.instructor_models SETTING_JSON
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from typing import Any, Literal

import instructor
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict

from tests.compat.setting import QUESTION, Setting, run

USER: Any = [{"role": "user", "content": QUESTION}]


class Capital(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "London", "Tokyo"]
    is_capital: bool


class Weather(BaseModel):
    """The weather in a city."""

    city: str


def client(setting: Setting, mode: instructor.Mode) -> Any:
    return instructor.from_openai(OpenAI(base_url=setting.base, api_key="none", max_retries=0), mode=mode)


def options(setting: Setting) -> dict[str, Any]:
    return {"model": setting.model, "messages": USER, "temperature": 0, "max_tokens": 128, "max_retries": 0}


def by_tool(setting: Setting) -> None:
    """The function's name is demanded, so a grammar holds the answer to its schema."""
    capital, answer = client(setting, instructor.Mode.TOOLS).create_with_completion(
        response_model=Capital, **options(setting)
    )
    assert isinstance(capital, Capital)
    assert answer.usage.completion_tokens > 0


def by_strict_tool(setting: Setting) -> None:
    api = client(setting, instructor.Mode.TOOLS_STRICT)
    assert isinstance(api.create(response_model=Capital, **options(setting)), Capital)


def by_json_schema(setting: Setting) -> None:
    api = client(setting, instructor.Mode.JSON_SCHEMA)
    assert isinstance(api.create(response_model=Capital, **options(setting)), Capital)


def streamed(setting: Setting) -> None:
    """`create_partial`: what there is of the object so far, the last one whole."""
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        *_, last = client(setting, mode).create_partial(response_model=Capital, **options(setting))
        Capital.model_validate(last.model_dump())


def certain_tool(setting: Setting) -> None:
    """The scripted server's call, whole and by the asynchronous client."""
    body: Any = {"model": setting.scripted_model, "messages": USER, "response_model": Weather, "max_retries": 0}
    with OpenAI(base_url=setting.scripted, api_key="none", max_retries=0) as plain:
        assert instructor.from_openai(plain).create(**body).city == "Paris"

    async def ask() -> Any:
        async with AsyncOpenAI(base_url=setting.scripted, api_key="none", max_retries=0) as plain:
            return await instructor.from_openai(plain).create(**body)

    assert asyncio.run(ask()).city == "Paris"


def several(setting: Setting) -> None:
    """Parallel calls become one object each."""
    body: Any = {"model": setting.scripted_model, "messages": [{"role": "user", "content": "The weather in both?"}]}
    plain = OpenAI(base_url=setting.scripted, api_key="none", max_retries=0)
    api = instructor.from_openai(plain, mode=instructor.Mode.PARALLEL_TOOLS)
    found: Any = api.create(response_model=Iterable[Weather], max_retries=0, **body)
    assert [each.city for each in found] == ["Paris", "London"]


EXERCISES = (by_tool, by_strict_tool, by_json_schema, streamed, certain_tool, several)

if __name__ == "__main__":
    sys.exit(run(EXERCISES))
