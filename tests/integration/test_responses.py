"""Responses from a real server and runner, through the openai package's client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.integration.real_server import RealServer


class Tree(BaseModel):
    kind: Literal["oak", "elm"]
    rings: Annotated[int, Field(ge=0, le=9)]


@pytest.fixture(scope="module")
def client(server: RealServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_an_answer_is_chats(client: openai.OpenAI) -> None:
    """Greedily, and in the second turn too: the conversation that is kept is the one that chat is sent."""
    first = client.responses.create(
        model="m", instructions="Be kind.", input="hello", max_output_tokens=12, temperature=0
    )
    second = client.responses.create(
        model="m", input="more", max_output_tokens=12, temperature=0, previous_response_id=first.id
    )
    system, user = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello"}
    answered = [user, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "more"}]
    for response, messages in ((first, [system, user]), (second, answered)):
        chat = client.chat.completions.create(model="m", messages=messages, max_tokens=12, temperature=0)  # type: ignore[arg-type]
        assert response.output_text == chat.choices[0].message.content
        assert response.usage is not None
        assert chat.usage is not None
        assert response.usage.input_tokens == chat.usage.prompt_tokens
        assert (response.status == "incomplete") == (chat.choices[0].finish_reason == "length")


def test_a_form(client: openai.OpenAI) -> None:
    whole = client.responses.parse(
        model="m", input="hello", text_format=Tree, max_output_tokens=300, extra_body={"seed": 6}
    )
    with client.responses.stream(
        model="m", input="hello", text_format=Tree, max_output_tokens=300, extra_body={"seed": 6}
    ) as stream:
        streamed = stream.until_done().get_final_response()
    assert isinstance(whole.output_parsed, Tree)
    assert streamed.output_parsed == whole.output_parsed
