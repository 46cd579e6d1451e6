"""The response object: what its request asked for, and what has become of it so far."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from server.answer import Usage
from server.errors import APIError
from server.responses.schema import ResponseRequest
from server.responses.tool_members import chat_tools, told_tool_choice, told_tools
from server.services import Services

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """`asked`: the members that tell the request."""

    id: str
    created: int
    model: str
    asked: Json

    @classmethod
    def new(cls, response_id: str, request: ResponseRequest, services: Services, *, stored: bool) -> ResponseHead:
        """Of a request that has been checked. Raises ModelNotFound."""
        asked = _asked(request, services, stored)
        return cls(response_id, int(time.time()), services.model_name(request.model), asked)

    @property
    def nbytes(self) -> int:
        """Of what it tells of the request: instructions, tools and the description of a format may be long."""
        return len(msgspec.json.encode(self.asked))

    def running(self, status: Literal["queued", "in_progress"] = "in_progress") -> Json:
        return self._body(status, [], None)

    def ended(
        self, status: Literal["completed", "incomplete"], output: Sequence[Json], usage: Usage, reasoning_tokens: int
    ) -> Json:
        body = self._body(status, output, _usage(usage, reasoning_tokens))
        if status == "incomplete":
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            body["completed_at"] = int(time.time())
        return body

    def cancelled(self, output: Sequence[Json]) -> Json:
        return self._body("cancelled", output, None)

    def failed(self, error: APIError, output: Sequence[Json]) -> Json:
        error.note()
        # OpenAI's list of codes is closed: ours are not in it.
        code = "server_error" if error.status >= 499 else "invalid_prompt"
        body = self._body("failed", output, None)
        return body | {"error": {"code": code, "message": error.message}}

    def _body(self, status: str, output: Sequence[Json], usage: Json | None) -> Json:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": output,
            **self.asked,
            "usage": usage,
        }


def _asked(request: ResponseRequest, services: Services, stored: bool) -> Json:
    defaults, reasoning, tools = services.defaults, request.reasoning, chat_tools(request.tools)
    return {
        "background": bool(request.background),
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "service_tier": "default",
        "store": stored,
        "temperature": defaults.temperature if request.temperature is None else request.temperature,
        "text": _text(request),
        "tool_choice": told_tool_choice(request.tool_choice, tools),
        "tools": told_tools(tools),
        "top_logprobs": request.top_logprobs or 0,
        "top_p": defaults.top_p if request.top_p is None else request.top_p,
        "truncation": "disabled",
    }


def _text(request: ResponseRequest) -> Json:
    form = {"type": "text"} if request.text is None or request.text.format is None else request.text.format
    if form["type"] == "json_schema":
        members = ("type", "name", "description", "schema", "strict")
        form = {key: form[key] for key in members if form.get(key) is not None}
    else:
        form = {"type": form["type"]}
    verbosity = None if request.text is None else request.text.verbosity
    return {"format": form} if verbosity is None else {"format": form, "verbosity": verbosity}


def _usage(usage: Usage, reasoning_tokens: int) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
