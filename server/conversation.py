"""The `messages` of a chat request, checked and reduced to what a chat template takes: roles and strings.

Checked by hand and not by a schema: a conversation may have thousands of messages, and an error must name the one
place that is wrong (`messages[3].content`).
"""

from __future__ import annotations

from typing import Any

from server.errors import InvalidRequest, UnsupportedParameter

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Roles as clients name them and as templates know them (`developer` is OpenAI's newer name of `system`)."""
_TOOL_ROLES = ("tool", "function")
MAX_MESSAGES = 16384


def parse_messages(value: Any, *, keep_developer: bool = False) -> list[dict[str, str]]:
    """`value`: whatever the body had under `messages`. Each message gets `role` and `content`, and `name` where given.
    `keep_developer`: the template knows this role; to others it is `system`.

    Raises InvalidRequest, or UnsupportedParameter for what would need tools or media.
    """
    if not isinstance(value, list):
        raise _invalid("messages", "must be a list of messages")
    if not value:
        raise _invalid("messages", "must have at least one message")
    if len(value) > MAX_MESSAGES:
        raise _invalid("messages", f"must have at most {MAX_MESSAGES} messages")
    messages = [_parse_message(message, f"messages[{index}]") for index, message in enumerate(value)]
    if keep_developer:
        for message, given in zip(messages, value, strict=True):
            if given["role"] == "developer":
                message["role"] = "developer"
    return messages


def _parse_message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise _invalid(where, "must be an object")
    role = message.get("role")
    if role in _TOOL_ROLES:
        raise _unsupported(f"{where}.role", "tool messages are not supported")
    if not isinstance(role, str) or role not in _ROLES:
        raise _invalid(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
    for key in ("tool_calls", "function_call", "audio"):
        if message.get(key):
            raise _unsupported(f"{where}.{key}", "is not supported")
    content = message.get("content")
    if content is None and role == "assistant":
        content = message.get("refusal") or ""  # a replayed answer that refused
    parsed = {"role": _ROLES[role], "content": _parse_content(content, f"{where}.content")}
    if message.get("name") is not None:
        parsed["name"] = _string(message["name"], f"{where}.name")
    return parsed


def _parse_content(content: Any, where: str) -> str:
    """A string as it is; text parts joined by line ends."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _invalid(where, "must be a string or a list of content parts")
    if not content:
        raise _invalid(where, "must have at least one part")
    return "\n".join(_parse_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _parse_part(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise _invalid(where, "must be an object")
    kind = part.get("type")
    if kind in ("text", "refusal"):
        return _string(part.get(kind), f"{where}.{kind}")
    if not isinstance(kind, str):
        raise _invalid(f"{where}.type", "must be a string")
    raise _unsupported(f"{where}.type", "only text parts are supported")


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _invalid(where, "must be a string")
    return value


def _invalid(where: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{where} {what}.", param=where)


def _unsupported(where: str, what: str) -> UnsupportedParameter:
    return UnsupportedParameter(f"{where}: {what}.", param=where)
