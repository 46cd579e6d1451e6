"""A response request as a chat request, and chat's errors in the words of the Responses API. Called by `routes`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from server.errors import APIError, InvalidRequest, UnsupportedParameter
from server.responses.items import Turn, messages_of
from server.responses.schema import SHARED_WITH_CHAT, ResponseRequest
from server.responses.tool_members import chat_tool_choice, chat_tools
from server.schemas import parse
from server.services import Services
from server.tools.definitions import parse_tools
from server.unsupported import RESPONSE, refuse_unknown, refuse_unsupported

_REASONING = {"summary": "auto", "generate_summary": "auto", "context": "auto", "mode": "standard"}
"""Members of `reasoning`, and the one value of each that asks for nothing: reasoning is told as it is, without a
summary, and the chat template decides what of it the model sees again."""


def parse_request(body: Mapping[str, Any], services: Services) -> ResponseRequest:
    """Raises InvalidRequest, and UnsupportedParameter for what is not done here."""
    refuse_unsupported(body, RESPONSE)
    request = parse(ResponseRequest, body)
    if services.strict_params:
        refuse_unknown(body, ResponseRequest, RESPONSE)
    _check(request)
    return request


def _check(request: ResponseRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options is only allowed with stream: true.", param="stream_options")
    if request.stream_options is not None and request.stream_options.include_obfuscation:
        raise _unsupported("stream_options.include_obfuscation", "is not supported")
    if request.background and request.store is False:
        raise InvalidRequest("background: true needs store: true.", param="background")
    if request.background and request.stream:
        raise _unsupported("background", "must be false in a stream")
    if request.truncation == "auto":
        raise _unsupported("truncation", "must be disabled: an input that is too long is refused")
    if "reasoning.encrypted_content" in (request.include or ()):
        raise _unsupported("include", "reasoning.encrypted_content is not supported: reasoning is told in the clear")
    for name, neutral in _REASONING.items():
        if request.reasoning is not None and getattr(request.reasoning, name) not in (None, neutral):
            raise _unsupported(f"reasoning.{name}", f"must be {neutral}")


def chat_body(request: ResponseRequest, turns: Sequence[Turn]) -> dict[str, Any]:
    """The chat request for the conversation `turns`. Raises InvalidRequest and UnsupportedParameter."""
    given = ((name, getattr(request, name)) for name in SHARED_WITH_CHAT)
    body: dict[str, Any] = {name: value for name, value in given if value is not None}
    head = [] if request.instructions is None else [{"role": "system", "content": request.instructions}]
    body["messages"] = head + messages_of(turns)
    body["max_completion_tokens"] = request.max_output_tokens
    tools = chat_tools(request.tools)
    body["tool_choice"], body["tools"] = chat_tool_choice(request.tool_choice, tools)
    if tools is not None and len(tools) != len(body["tools"]):
        parse_tools(tools, None, None)  # Those that are not told to the model are checked too.
    if request.wants_logprobs:
        if body["tools"] and body["tool_choice"] != "none":
            where = "top_logprobs" if request.top_logprobs else "include"
            raise _unsupported(where, "log-probabilities are not supported together with tools")
        body |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    if request.text is not None and request.text.format is not None:
        body["response_format"] = _response_format(request.text.format)
    return body


def _response_format(value: Any) -> Any:
    if not isinstance(value, dict) or value.get("type") != "json_schema":
        return value
    if not isinstance(value.get("description"), str | None):  # Chat does not look at it, a response tells it.
        raise InvalidRequest("text.format.description must be a string.", param="text.format.description")
    return {"type": "json_schema", "json_schema": {key: value.get(key) for key in ("name", "schema", "strict")}}


def _unsupported(where: str, what: str) -> UnsupportedParameter:
    return UnsupportedParameter(f"{where}: {what}.", param=where)


# --- errors -----------------------------------------------------------------------------------------------------------

_NAMES = (
    (re.compile(r"^response_format\.json_schema"), "text.format"),
    (re.compile(r"^response_format"), "text.format"),
    (re.compile(r"^max_completion_tokens"), "max_output_tokens"),
    (re.compile(r"^(tools\[\d+\]|tool_choice)\.function"), r"\1"),
    (re.compile(r"^messages.*"), "input"),
)
"""Chat's names of fields, and ours."""


@contextmanager
def errors_in_our_words() -> Iterator[None]:
    """Chat's errors name the fields that the client has sent."""
    try:
        yield
    except APIError as error:
        param = error.param
        ours = param and _our_name(param)
        if param is None or ours is None or ours == param:
            raise
        message = _in_our_words(error.message, param, ours)
        raise APIError(
            error.status, message, type=error.type, param=ours, code=error.code, headers=error.headers
        ) from None


def _in_our_words(message: str, param: str, ours: str) -> str:
    if param != "messages":
        return message.replace(param, ours)
    # Not everywhere: a template's own words stay as they are.
    message = message.replace("max_completion_tokens", "max_output_tokens")
    for before in ("your ", "in the ", "length of the "):
        message = message.replace(f"{before}messages", f"{before}input")
    return message


def _our_name(param: str) -> str:
    for pattern, ours in _NAMES:
        renamed, count = pattern.subn(ours, param)
        if count:
            return renamed
    return param
