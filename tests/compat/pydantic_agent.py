"""pydantic-ai's agents against the servers of `tests.compat`.

python -m tests.compat.pydantic_agent SETTING_JSON
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.compat.setting import QUESTION, WEATHER, WEATHER_ANSWER, Setting, run


class Capital(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "London", "Tokyo"]
    is_capital: bool


def default_model(setting: Setting) -> Any:
    settings: Any = {"temperature": 0, "max_tokens": 128}
    provider = OpenAIProvider(base_url=setting.base, api_key="none")
    return OpenAIChatModel(setting.model, provider=provider, settings=settings)


def weather_agent(setting: Setting, asked: list[str]) -> Any:
    provider = OpenAIProvider(base_url=setting.scripted, api_key="none")
    agent: Any = Agent(OpenAIChatModel(setting.scripted_model, provider=provider))

    def get_weather(city: str) -> str:
        """The weather in a city."""
        asked.append(city)
        return WEATHER

    agent.tool_plain(get_weather)
    return agent


def chat(setting: Setting) -> None:
    result: Any = Agent(default_model(setting)).run_sync(QUESTION)
    assert result.output == setting.answer
    assert result.usage.input_tokens == len(setting.prompt_ids)


def chat_streamed(setting: Setting) -> None:
    async def ask() -> str:
        async with Agent(default_model(setting)).run_stream(QUESTION) as result:
            return "".join([piece async for piece in result.stream_text(delta=True)])

    assert asyncio.run(ask()) == setting.answer


def responses(setting: Setting) -> None:
    """The same agent through `/v1/responses`, whole and streamed."""
    settings: Any = {"temperature": 0, "max_tokens": 128}
    provider = OpenAIProvider(base_url=setting.base, api_key="none")
    agent: Any = Agent(OpenAIResponsesModel(setting.model, provider=provider, settings=settings))

    async def ask() -> str:
        async with agent.run_stream(QUESTION) as result:
            return "".join([piece async for piece in result.stream_text(delta=True)])

    assert agent.run_sync(QUESTION).output == asyncio.run(ask()) == setting.answer


def conversation(setting: Setting) -> None:
    """The second turn replays the first one."""
    agent: Any = Agent(default_model(setting))
    first = agent.run_sync(QUESTION)
    second = agent.run_sync("And of Germany?", message_history=first.all_messages())
    assert len(second.all_messages()) == 4 and second.output


def tools(setting: Setting) -> None:
    """The agent runs the tools, at once and in threads, and sends their results back by itself."""
    asked: list[str] = []
    result = weather_agent(setting, asked).run_sync("The weather in both?")
    assert sorted(asked) == ["London", "Paris"]
    assert result.output == WEATHER_ANSWER


def tools_streamed(setting: Setting) -> None:
    asked: list[str] = []

    async def ask() -> str:
        async with weather_agent(setting, asked).run_stream("The weather in both?") as result:
            return str(await result.get_output())

    assert asyncio.run(ask()) == WEATHER_ANSWER
    assert sorted(asked) == ["London", "Paris"]


def structured_output(setting: Setting) -> None:
    """By `response_format`, and by a tool that is demanded; each whole and streamed."""

    async def stream(agent: Any) -> Any:
        async with agent.run_stream(QUESTION) as result:
            return await result.get_output()

    for form in (NativeOutput(Capital, strict=True), ToolOutput(Capital)):
        agent: Any = Agent(default_model(setting), output_type=form, retries=0)
        assert isinstance(agent.run_sync(QUESTION).output, Capital)
        assert isinstance(asyncio.run(stream(agent)), Capital)


EXERCISES = (chat, chat_streamed, responses, conversation, tools, tools_streamed, structured_output)

if __name__ == "__main__":
    sys.exit(run(EXERCISES))
