"""langchain-openai (`ChatOpenAI`, `OpenAI`, `OpenAIEmbeddings`) against the servers of `tests.compat`.

python -m tests.compat.langchain_chat SETTING_JSON
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

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


def chat_model(setting: Setting, **options: Any) -> Any:
    return ChatOpenAI(
        base_url=setting.base, model=setting.model, api_key="none", temperature=0, max_retries=0, **options
    )


def scripted_model(setting: Setting) -> Any:
    return ChatOpenAI(base_url=setting.scripted, model=setting.scripted_model, api_key="none", max_retries=0)


def chat(setting: Setting) -> None:
    message = chat_model(setting, logprobs=True).invoke(QUESTION)
    assert message.content == setting.answer
    assert message.usage_metadata["input_tokens"] == len(setting.prompt_ids)
    assert message.response_metadata["finish_reason"] == "stop"
    assert message.response_metadata["logprobs"]["content"]


def chat_streamed(setting: Setting) -> None:
    whole = None
    for chunk in chat_model(setting, stream_usage=True).stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None and whole.content == setting.answer
    assert whole.usage_metadata["input_tokens"] == len(setting.prompt_ids)


def chat_batched(setting: Setting) -> None:
    messages = asyncio.run(chat_model(setting).abatch([QUESTION] * 4))
    assert [message.content for message in messages] == [setting.answer] * 4


def tools(setting: Setting) -> None:
    model = scripted_model(setting).bind_tools([WEATHER_TOOL])
    messages: list[Any] = [HumanMessage("The weather in both?")]
    first = model.invoke(messages)
    assert [(call["name"], call["args"]) for call in first.tool_calls] == [
        ("get_weather", {"city": "Paris"}),
        ("get_weather", {"city": "London"}),
    ]
    messages += [first, *(ToolMessage(WEATHER, tool_call_id=call["id"]) for call in first.tool_calls)]
    assert model.invoke(messages).content == WEATHER_ANSWER


def tools_streamed(setting: Setting) -> None:
    whole = None
    for chunk in scripted_model(setting).bind_tools([WEATHER_TOOL]).stream("The weather in both?"):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert [call["args"] for call in whole.tool_calls] == [{"city": "Paris"}, {"city": "London"}]


def tool_demanded(setting: Setting) -> None:
    for choice in ("any", "get_weather"):
        model = chat_model(setting, max_tokens=64).bind_tools([WEATHER_TOOL], tool_choice=choice)
        assert model.invoke(QUESTION).tool_calls[0]["args"]["city"] in CITIES


def structured_output(setting: Setting) -> None:
    schema = {"title": "capital", "description": "A city.", **CITY_SCHEMA}
    for method in ("json_schema", "function_calling"):
        model = chat_model(setting, max_tokens=128).with_structured_output(schema, method=method, strict=True)
        check_city(model.invoke(QUESTION))


def completions(setting: Setting) -> None:
    """langchain's prompts are texts: neither ids nor embeddings."""
    options: dict[str, Any] = {"model": setting.model, "temperature": 0, "max_tokens": 24, "max_retries": 0}
    model = OpenAI(base_url=setting.base, api_key="none", **options)
    text = model.invoke("The capital of France is")
    assert "".join(model.stream("The capital of France is")) == text and text


def embeddings(setting: Setting) -> None:
    """Without its own check of lengths, which tokenises for OpenAI's models and fetches what it needs for that."""
    model = OpenAIEmbeddings(
        base_url=setting.base, model=setting.model, api_key="none", check_embedding_ctx_length=False, max_retries=0
    )
    texts = ["Paris is the capital of France.", "A recipe for onion soup."]
    vectors = model.embed_documents(texts)
    question = model.embed_query("What is the capital of France?")
    likeness = [sum(a * b for a, b in zip(question, vector, strict=True)) for vector in vectors]
    assert likeness[0] > likeness[1]
    assert asyncio.run(model.aembed_documents(texts * 40, chunk_size=16))[-1] is not None


EXERCISES = (
    chat,
    chat_streamed,
    chat_batched,
    tools,
    tools_streamed,
    tool_demanded,
    structured_output,
    completions,
    embeddings,
)

if __name__ == "__main__":
    sys.exit(run(EXERCISES))
