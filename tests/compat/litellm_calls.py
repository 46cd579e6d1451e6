"""litellm, with its provider for OpenAI-compatible servers, against the servers of `tests.compat`.

python -m tests.compat.litellm_calls SETTING_JSON
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # before the import, which would else ask the network for prices

import litellm

from tests.compat.setting import (
    CITIES,
    CITY_SCHEMA,
    QUESTION,
    WEATHER,
    WEATHER_ANSWER,
    WEATHER_TOOL,
    Setting,
    check_city,
    run,
)

USER: Any = [{"role": "user", "content": QUESTION}]


def default_model(setting: Setting) -> dict[str, Any]:
    return {
        "model": f"openai/{setting.model}",
        "api_base": setting.base,
        "api_key": "none",
        "temperature": 0,
        "max_retries": 0,
    }


def scripted_model(setting: Setting) -> dict[str, Any]:
    return {"model": f"openai/{setting.scripted_model}", "api_base": setting.scripted, "api_key": "none"}


def chat(setting: Setting) -> None:
    answer: Any = litellm.completion(messages=USER, logprobs=True, **default_model(setting))
    assert answer.choices[0].message.content == setting.answer
    assert answer.choices[0].logprobs.content
    assert answer.usage.prompt_tokens == len(setting.prompt_ids)


def chat_streamed(setting: Setting) -> None:
    stream: Any = litellm.completion(
        messages=USER, stream=True, stream_options={"include_usage": True}, **default_model(setting)
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == setting.answer
    whole: Any = litellm.stream_chunk_builder(chunks)
    assert whole.choices[0].message.content == setting.answer
    assert whole.usage.prompt_tokens == len(setting.prompt_ids)


def chat_asynchronous(setting: Setting) -> None:
    async def ask() -> str:
        stream: Any = await litellm.acompletion(messages=USER, stream=True, **default_model(setting))
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(ask()) == setting.answer


def tools(setting: Setting) -> None:
    messages: Any = [{"role": "user", "content": "The weather in both?"}]
    first: Any = litellm.completion(messages=messages, tools=[WEATHER_TOOL], **scripted_model(setting))
    calls = first.choices[0].message.tool_calls
    assert first.choices[0].finish_reason == "tool_calls"
    assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Paris", "London"]
    messages.append(first.choices[0].message)
    messages += [{"role": "tool", "tool_call_id": call.id, "content": WEATHER} for call in calls]
    second: Any = litellm.completion(messages=messages, tools=[WEATHER_TOOL], **scripted_model(setting))
    assert second.choices[0].message.content == WEATHER_ANSWER


def tools_streamed(setting: Setting) -> None:
    messages: Any = [{"role": "user", "content": "The weather in both?"}]
    stream: Any = litellm.completion(messages=messages, tools=[WEATHER_TOOL], stream=True, **scripted_model(setting))
    whole: Any = litellm.stream_chunk_builder(list(stream))
    calls = whole.choices[0].message.tool_calls
    assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Paris", "London"]


def tool_demanded(setting: Setting) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    answer: Any = litellm.completion(
        messages=USER, tools=[WEATHER_TOOL], tool_choice=named, max_tokens=64, **default_model(setting)
    )
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in CITIES


def structured_output(setting: Setting) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": CITY_SCHEMA}}
    answer: Any = litellm.completion(messages=USER, response_format=form, max_tokens=128, **default_model(setting))
    check_city(json.loads(answer.choices[0].message.content))


def completions(setting: Setting) -> None:
    """Token ids, and embeddings through `extra_body`, each whole and streamed."""
    options = default_model(setting) | {"model": f"text-completion-openai/{setting.model}", "max_tokens": 24}
    for prompt, extra in ((setting.prompt_ids, {}), ("", {"prompt_embeds": setting.prompt_embeds})):
        whole: Any = litellm.text_completion(prompt=prompt, extra_body=extra, **options)
        assert whole.choices[0].text == setting.answer
        assert whole.usage.prompt_tokens == len(setting.prompt_ids)
        stream: Any = litellm.text_completion(prompt=prompt, extra_body=extra, stream=True, **options)
        assert "".join(chunk.choices[0].text or "" for chunk in stream) == setting.answer


def errors(setting: Setting) -> None:
    try:
        litellm.completion(messages=USER, **(default_model(setting) | {"temperature": 3}))
    except litellm.BadRequestError as error:
        assert "temperature" in str(error)
    else:
        raise AssertionError("a temperature of 3 was taken")


EXERCISES = (
    chat,
    chat_streamed,
    chat_asynchronous,
    tools,
    tools_streamed,
    tool_demanded,
    structured_output,
    completions,
    errors,
)

if __name__ == "__main__":
    sys.exit(run(EXERCISES))
