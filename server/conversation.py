"""The `messages` of a chat request, checked and reduced to what a chat template takes: roles, strings and calls.

Checked by hand and not by a schema: a conversation may have thousands of messages, and an error must name the one
place that is wrong (`messages[3].content`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from server.embedding_markers import ROW_PARTS, EmbeddingMarkers, no_embeddings
from server.errors import InvalidRequest, UnsupportedParameter
from server.json_nodes import MAX_NODES

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Roles as clients name them and as templates know them (`developer` is OpenAI's newer name of `system`)."""
MAX_MESSAGES = 16384
MAX_CONTENT_PARTS = 16384
"""Of all messages together: each takes microseconds of the event loop's time, and a body has room for millions."""
MAX_CALLS = 128
"""Of one message."""
_MAX_ID_CHARS = 256
_MAX_NAME_CHARS = 64


class ParsedArguments(dict[str, Any]):
    """A call's arguments as an object, and as the text that they came as: templates want one or the other."""

    text: str


def parse_messages(
    value: Any, *, keep_developer: bool = False, embeddings: EmbeddingMarkers | None = None
) -> list[dict[str, Any]]:
    """`value`: whatever the body had under `messages`. Each message gets `role` and `content`, and where given `name`,
    `tool_call_id`, `reasoning_content` and `tool_calls` (with their arguments as objects, if they are any).
    `keep_developer`: the template knows this role; to others it is `system`. `embeddings`: takes the embedding parts,
    whose markers become part of the content; None: there may be none.

    Raises InvalidRequest, or UnsupportedParameter for what would need media.
    """
    if not isinstance(value, list):
        raise _invalid("messages", "must be a list of messages")
    if not value:
        raise _invalid("messages", "must have at least one message")
    if len(value) > MAX_MESSAGES:
        raise _invalid("messages", f"must have at most {MAX_MESSAGES} messages")
    if sum(map(_num_parts, value)) > MAX_CONTENT_PARTS:
        raise _invalid("messages", f"must have at most {MAX_CONTENT_PARTS} content parts")
    if sum(map(_num_brackets, value)) > MAX_NODES:
        raise _invalid("messages", f"must have at most {MAX_NODES} objects and lists in the arguments of their calls")
    messages = [_parse_message(message, f"messages[{index}]", embeddings) for index, message in enumerate(value)]
    if keep_developer:
        for message, given in zip(messages, value, strict=True):
            if given["role"] == "developer":
                message["role"] = "developer"
    return messages


def _num_parts(message: Any) -> int:
    content = message.get("content") if isinstance(message, dict) else None
    return len(content) if isinstance(content, list) else 0


def _num_brackets(message: Any) -> int:
    """In the arguments of its calls, which are parsed here: at most so many objects and lists."""
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    texts = [function.get("arguments") for function in functions if isinstance(function, dict)]
    return sum(text.count("{") + text.count("[") for text in texts if isinstance(text, str))


def _parse_message(message: Any, where: str, embeddings: EmbeddingMarkers | None) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _invalid(where, "must be an object")
    role = message.get("role")
    if role == "function":
        raise _unsupported(f"{where}.role", "function messages are not supported, tool messages are")
    if not isinstance(role, str) or role not in _ROLES:
        raise _invalid(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
    for key in ("function_call", "audio"):
        if message.get(key):
            raise _unsupported(f"{where}.{key}", "is not supported")
    content = message.get("content")
    if content is None and role == "assistant":
        content = message.get("refusal") or ""  # a replayed answer that refused
    content = _parse_content(content, f"{where}.content", embeddings)
    parsed: dict[str, Any] = {"role": _ROLES[role], "content": content}
    if role == "tool":
        parsed["tool_call_id"] = _short_string(message.get("tool_call_id"), f"{where}.tool_call_id", _MAX_ID_CHARS)
    elif role == "assistant":
        parsed |= _parse_answer(message, where)
    if message.get("name") is not None:
        parsed["name"] = _string(message["name"], f"{where}.name")
    return parsed


def _parse_answer(message: dict[str, Any], where: str) -> dict[str, Any]:
    """What only an assistant's message has."""
    parsed: dict[str, Any] = {}
    for key in ("reasoning_content", "reasoning"):
        if message.get(key) is not None:
            parsed["reasoning_content"] = _string(message[key], f"{where}.{key}")
            break
    calls, where = message.get("tool_calls"), f"{where}.tool_calls"
    if calls is None or calls == []:
        return parsed
    if not isinstance(calls, list):
        raise _invalid(where, "must be a list of tool calls")
    if len(calls) > MAX_CALLS:
        raise _invalid(where, f"must have at most {MAX_CALLS} tool calls")
    parsed["tool_calls"] = [_parse_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]
    return parsed


def _parse_call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise _invalid(where, "must be an object")
    kind = call.get("type", "function")
    if kind != "function":
        if not isinstance(kind, str):
            raise _invalid(f"{where}.type", 'must be "function"')
        raise _unsupported(f"{where}.type", "only functions are supported")
    function = call.get("function")
    if not isinstance(function, dict):
        raise _invalid(f"{where}.function", "must be an object")
    name = _short_string(function.get("name"), f"{where}.function.name", _MAX_NAME_CHARS)
    arguments = _string(function.get("arguments"), f"{where}.function.arguments")
    return {
        "id": _short_string(call.get("id"), f"{where}.id", _MAX_ID_CHARS),
        "type": "function",
        "function": {"name": name, "arguments": _parse_arguments(arguments)},
    }


def _parse_arguments(text: str) -> ParsedArguments | str:
    """Models do not always write JSON, and their clients send back what they got: such arguments stay text."""
    try:
        value = msgspec.json.decode(text.encode()) if text.strip() else {}
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return text
    if not isinstance(value, dict):
        return text
    arguments = ParsedArguments(value)
    arguments.text = text
    return arguments


def _parse_content(content: Any, where: str, embeddings: EmbeddingMarkers | None) -> str | list[dict[str, str]]:
    """A string as it is; text parts joined by line ends, but nothing between them and embeddings. With images among
    them, a list for the template (which puts the images where it wants them)."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _invalid(where, "must be a string or a list of content parts")
    if not content:
        raise _invalid(where, "must have at least one part")
    if any(isinstance(part, dict) and part.get("type") == "image_url" for part in content):
        return _parse_seen(content, where, embeddings)
    pieces: list[str] = []
    after_text = False
    for index, part in enumerate(content):
        is_text = not (isinstance(part, dict) and part.get("type") in ROW_PARTS)
        if is_text and after_text:
            pieces.append("\n")
        pieces.append(_parse_part(part, f"{where}[{index}]", embeddings))
        after_text = is_text
    return "".join(pieces)


def _parse_seen(content: list[Any], where: str, embeddings: EmbeddingMarkers | None) -> list[dict[str, str]]:
    """Texts and images as a template takes them; embeddings and soft prompts become part of the text next to them."""
    items: list[dict[str, str]] = []
    glues = False  # rows stand before
    for index, part in enumerate(content):
        if isinstance(part, dict) and part.get("type") == "image_url":
            if embeddings is None:
                raise no_embeddings(f"{where}[{index}]")
            embeddings.add_image(part, f"{where}[{index}]")
            items.append({"type": "image"})
            glues = False
            continue
        is_rows = isinstance(part, dict) and part.get("type") in ROW_PARTS
        text = _parse_part(part, f"{where}[{index}]", embeddings)
        if items and items[-1]["type"] == "text" and (is_rows or glues):
            items[-1]["text"] += text
        else:
            items.append({"type": "text", "text": text})
        glues = is_rows
    return items


def _parse_part(part: Any, where: str, embeddings: EmbeddingMarkers | None) -> str:
    if not isinstance(part, dict):
        raise _invalid(where, "must be an object")
    kind = part.get("type")
    if kind in ROW_PARTS:
        if embeddings is None:
            raise no_embeddings(where)
        return embeddings.mark(part, where)
    if kind in ("text", "refusal"):
        return _string(part.get(kind), f"{where}.{kind}")
    if not isinstance(kind, str):
        raise _invalid(f"{where}.type", "must be a string")
    raise _unsupported(f"{where}.type", "only text, image_url, prompt_embeds and soft_prompt parts are supported")


def _short_string(value: Any, where: str, limit: int) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= limit:
        raise _invalid(where, f"must be a string of 1 to {limit} characters")
    return value


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _invalid(where, "must be a string")
    return value


def _invalid(where: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{where} {what}.", param=where)


def _unsupported(where: str, what: str) -> UnsupportedParameter:
    return UnsupportedParameter(f"{where}: {what}.", param=where)
