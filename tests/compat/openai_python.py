"""The `openai` package, of either major version, against the servers of `tests.compat`.

python -m tests.compat.openai_python SETTING_JSON
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import openai
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

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
TOOL: Any = WEATHER_TOOL


class Capital(BaseModel):
    city: str
    is_capital: bool


def client(base: str) -> OpenAI:
    return OpenAI(base_url=base, api_key="none", max_retries=0)


def chat(setting: Setting) -> None:
    with client(setting.base) as api:
        assert [model.id for model in api.models.list()] == [setting.model]
        answer = api.chat.completions.create(
            model=setting.model, messages=USER, temperature=0, logprobs=True, top_logprobs=2
        )
    (choice,) = answer.choices
    assert choice.message.content == setting.answer
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert "".join(entry.token for entry in choice.logprobs.content).startswith(setting.answer)
    assert answer.usage is not None and answer.usage.prompt_tokens == len(setting.prompt_ids)


def chat_streamed(setting: Setting) -> None:
    with client(setting.base) as api:
        chunks = list(
            api.chat.completions.create(
                model=setting.model,
                messages=USER,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == setting.answer
    assert chunks[-1].usage is not None and chunks[-1].usage.prompt_tokens == len(setting.prompt_ids)


def chat_streamed_by_helper(setting: Setting) -> None:
    """`chat.completions.stream` puts the message together and checks the order of events."""
    with (
        client(setting.base) as api,
        api.chat.completions.stream(model=setting.model, messages=USER, temperature=0) as stream,
    ):
        kinds = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    assert message.content == setting.answer
    assert "content.delta" in kinds and kinds[-1] == "content.done"


def async_client(setting: Setting) -> None:
    async def ask() -> str:
        async with AsyncOpenAI(base_url=setting.base, api_key="none", max_retries=0) as api:
            stream = await api.chat.completions.create(model=setting.model, messages=USER, temperature=0, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(ask()) == setting.answer


def tools(setting: Setting) -> None:
    """There and back again: two calls, their results, an answer."""
    messages: Any = [{"role": "user", "content": "The weather in both?"}]
    with client(setting.scripted) as api:
        first = api.chat.completions.create(model=setting.scripted_model, messages=messages, tools=[TOOL])
        (choice,) = first.choices
        calls: Any = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls"
        assert [call.function.name for call in calls] == ["get_weather"] * 2
        assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Paris"}, {"city": "London"}]
        messages.append(choice.message)
        messages += [{"role": "tool", "tool_call_id": call.id, "content": WEATHER} for call in calls]
        second = api.chat.completions.create(model=setting.scripted_model, messages=messages, tools=[TOOL])
    assert second.choices[0].message.content == WEATHER_ANSWER


def tools_streamed(setting: Setting) -> None:
    """The helper parses the arguments of strict functions."""
    messages: Any = [{"role": "user", "content": "The weather in both?"}]
    strict: Any = {**TOOL, "function": {**TOOL["function"], "strict": True}}
    with (
        client(setting.scripted) as api,
        api.chat.completions.stream(model=setting.scripted_model, messages=messages, tools=[strict]) as stream,
    ):
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final: Any = stream.get_final_completion().choices[0].message.tool_calls
    assert [event.parsed_arguments for event in done] == [{"city": "Paris"}, {"city": "London"}]
    assert [call.function.parsed_arguments for call in final] == [{"city": "Paris"}, {"city": "London"}]


def tool_demanded(setting: Setting) -> None:
    """A grammar makes the default model call, and call once."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    demands: Any = ({"tool_choice": "required", "parallel_tool_calls": False}, {"tool_choice": named})
    with client(setting.base) as api:
        for demand in demands:
            answer = api.chat.completions.create(
                model=setting.model, messages=USER, tools=[TOOL], temperature=0, max_tokens=96, **demand
            )
            calls: Any = answer.choices[0].message.tool_calls
            (call,) = calls
            assert json.loads(call.function.arguments)["city"] in CITIES
            assert answer.choices[0].finish_reason == ("stop" if demand["tool_choice"] == named else "tool_calls")


def structured_output(setting: Setting) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": CITY_SCHEMA}}
    with client(setting.base) as api:
        answer = api.chat.completions.create(
            model=setting.model, messages=USER, response_format=form, temperature=0, max_tokens=64
        )
        parsed = api.chat.completions.parse(
            model=setting.model, messages=USER, response_format=Capital, temperature=0, max_tokens=128
        )
    check_city(json.loads(answer.choices[0].message.content or ""))
    assert isinstance(parsed.choices[0].message.parsed, Capital)


def completions(setting: Setting) -> None:
    """The same prompt as ids, as embeddings, and both of them streamed."""
    with client(setting.base) as api:
        for prompt, extra in prompts(setting):
            answer = api.completions.create(
                model=setting.model, prompt=prompt, temperature=0, max_tokens=24, logprobs=1, extra_body=extra
            )
            assert answer.choices[0].text == setting.answer
            assert answer.usage is not None and answer.usage.prompt_tokens == len(setting.prompt_ids)
            chunks = api.completions.create(
                model=setting.model, prompt=prompt, temperature=0, max_tokens=24, stream=True, extra_body=extra
            )
            assert "".join(chunk.choices[0].text for chunk in chunks) == setting.answer


def responses(setting: Setting) -> None:
    with client(setting.base) as api:
        first = api.responses.create(model=setting.model, input=QUESTION, temperature=0)
        assert (first.status, first.output_text) == ("completed", setting.answer)
        assert first.usage is not None and first.usage.input_tokens == len(setting.prompt_ids)
        with api.responses.stream(model=setting.model, input=QUESTION, temperature=0) as stream:
            pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
            assert stream.get_final_response().output_text == "".join(pieces) == setting.answer
        parsed = api.responses.parse(
            model=setting.model, input=QUESTION, text_format=Capital, temperature=0, max_output_tokens=128
        )
        assert isinstance(parsed.output_parsed, Capital)
        assert api.responses.retrieve(first.id).output_text == setting.answer
        second = api.responses.create(
            model=setting.model, input="And of Germany?", previous_response_id=first.id, temperature=0
        )
        assert second.output_text and second.usage is not None
        assert second.usage.input_tokens > first.usage.total_tokens
        api.responses.delete(first.id)
        try:
            api.responses.retrieve(first.id)
        except openai.NotFoundError:
            pass
        else:
            raise AssertionError("a response that was deleted is there")


def responses_in_background(setting: Setting) -> None:
    with client(setting.base) as api:
        response = api.responses.create(model=setting.model, input=QUESTION, temperature=0, background=True)
        assert response.status == "queued"
        while response.status in ("queued", "in_progress"):
            time.sleep(0.05)
            response = api.responses.retrieve(response.id)
        assert (response.status, response.output_text) == ("completed", setting.answer)
        endless = api.responses.create(
            model=setting.model, input=QUESTION, background=True, extra_body={"ignore_eos": True}
        )
        assert api.responses.cancel(endless.id).status == "cancelled"


def prompts(setting: Setting) -> list[tuple[Any, dict[str, Any]]]:
    """(prompt, extra body): token ids, then embeddings."""
    return [(setting.prompt_ids, {}), (None, {"prompt_embeds": setting.prompt_embeds})]


def embeddings(setting: Setting) -> None:
    """As the package asks by itself (base64, which it decodes), as floats, and of token ids."""
    with client(setting.base) as api:
        texts = ["What is the capital of France?", "Paris is the capital of France.", "A recipe for onion soup."]
        answer = api.embeddings.create(model=setting.model, input=texts)
        floats = api.embeddings.create(model=setting.model, input=texts, encoding_format="float")
        api.embeddings.create(model=setting.model, input=setting.prompt_ids)
    vectors = [each.embedding for each in answer.data]
    assert [each.index for each in answer.data] == [0, 1, 2]
    assert all(abs(sum(value * value for value in vector) - 1) < 1e-3 for vector in vectors)
    for vector, other in zip(vectors, floats.data, strict=True):
        assert max(abs(a - b) for a, b in zip(vector, other.embedding, strict=True)) < 1e-2
    likeness = [sum(a * b for a, b in zip(vectors[0], vector, strict=True)) for vector in vectors[1:]]
    assert likeness[0] > likeness[1]


def errors(setting: Setting) -> None:
    """Each status becomes the package's own exception, with the server's words."""
    with client(setting.base) as api:
        try:
            api.chat.completions.create(model=setting.model, messages=USER, temperature=3)
        except openai.BadRequestError as error:
            assert error.param == "temperature" and error.type == "invalid_request_error"
        else:
            raise AssertionError("a temperature of 3 was taken")
        try:
            api.chat.completions.create(model="another", messages=USER)
        except openai.NotFoundError as error:
            assert error.code == "model_not_found"
        else:
            raise AssertionError("an unknown model was taken")


EXERCISES = (
    chat,
    chat_streamed,
    chat_streamed_by_helper,
    async_client,
    tools,
    tools_streamed,
    tool_demanded,
    structured_output,
    completions,
    embeddings,
    responses,
    responses_in_background,
    errors,
)

if __name__ == "__main__":
    sys.exit(run(EXERCISES))
