"""Completions asked for in tests: whole and streamed answers, compared with each other and with OpenAI's own types."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
from openai.types import Completion
from safetensors.numpy import save

from tests.models import HIDDEN_SIZE
from tests.server.fakes import Api

ROUTE = "/v1/completions"
PROMPT = "What is the capital"
ANSWER = "Paris is the answer."


def events(response: httpx.Response) -> list[Any]:
    """The stream's events, the final [DONE] checked and left out."""
    assert response.status_code == 200, response.text
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def complete(client: Api, **body: Any) -> dict[str, Any]:
    """A whole answer, after it has been compared with the streamed one."""
    response = client.post(ROUTE, body)
    assert response.status_code == 200, response.text
    whole: dict[str, Any] = response.json()
    # Strict, except that the first echoed token's log-probability is null, in OpenAI's answers as well.
    if not body.get("echo"):
        Completion.model_validate(whole, strict=True)
    chunks = events(client.post(ROUTE, {**body, "stream": True, "stream_options": {"include_usage": True}}))
    if not body.get("echo"):
        for chunk in chunks:
            # The SDK's own type for chunks has no null in it where the API does.
            ended = [{**choice, "finish_reason": choice["finish_reason"] or "stop"} for choice in chunk["choices"]]
            Completion.model_validate({**chunk, "choices": ended}, strict=True)
    assert joined(chunks) == [
        {name: value for name, value in choice.items() if name != "prompt_token_ids"} for choice in whole["choices"]
    ]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    return whole


def joined(chunks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices that a stream adds up to."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            part.pop("prompt_token_ids", None)
            whole = choices.setdefault(part["index"], part)
            if whole is part:
                continue
            assert whole["finish_reason"] is None, "nothing may follow the finish_reason"
            whole["text"] += part["text"]
            whole["finish_reason"], whole["stop_reason"] = part["finish_reason"], part["stop_reason"]
            for name, values in (part["logprobs"] or {}).items():
                whole["logprobs"][name] += values
            if "token_ids" in part:
                whole["token_ids"] += part["token_ids"]
    return [choices[index] for index in sorted(choices)]


def refused(client: Api, status: int = 400, **body: Any) -> dict[str, Any]:
    """The error, which must be the same for a streamed request: before the first event, with a status."""
    response = client.post(ROUTE, body)
    assert response.status_code == status, response.text
    assert client.post(ROUTE, {**body, "stream": True}).status_code == status
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(response.content) < 4200
    return error


def embedding(rows: int, value: float = 0.5) -> tuple[str, np.ndarray[Any, Any]]:
    array = np.full((rows, HIDDEN_SIZE), value, dtype=np.float32)
    return base64.b64encode(save({"x": array})).decode(), array


def tokenizer_text(ids: list[int]) -> str:
    from tests.server.fakes import tokenizer

    return tokenizer().decode(ids, skip_special_tokens=True)
