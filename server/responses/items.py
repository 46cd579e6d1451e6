"""Items, in and out of the messages that chat knows.

An item of a conversation becomes one *turn*: a message with only what that item holds. `messages_of` joins the turns of
one answer (its reasoning, its text, its calls) into one assistant message. Turns are also what the store keeps: they
have no more than the model gets to see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from server.conversation import MAX_MESSAGES
from server.errors import InvalidRequest, UnsupportedParameter

Turn = dict[str, Any]

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of content parts, and the member in which each has its text."""
MAX_PARTS = 65536
"""Content parts of a whole input: each takes a microsecond of the event loop."""
_LISTS = ("content", "output", "summary")
_MAX_ID_CHARS = 256
_MAX_NAME_CHARS = 64


def parse_input(value: Any) -> list[Turn]:
    """`value`: whatever the body had under `input`.

    Raises InvalidRequest, which names the item and the member, and UnsupportedParameter for items that would need media
    or tools that are no functions.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise _invalid("input", "must be a string or a list of items")
    if not value:
        raise _invalid("input", "must have at least one item")
    if len(value) > MAX_MESSAGES:
        raise _invalid("input", f"must have at most {MAX_MESSAGES} items")
    if sum(map(_num_parts, value)) > MAX_PARTS:
        raise _invalid("input", f"must have at most {MAX_PARTS} content parts")
    turns = [_parse_item(item, f"input[{index}]") for index, item in enumerate(value)]
    return [turn for turn in turns if turn is not None]


def _num_parts(item: Any) -> int:
    if not isinstance(item, dict):
        return 0
    return sum(len(item[name]) for name in _LISTS if isinstance(item.get(name), list))


def turns_of_output(items: Iterable[Mapping[str, Any]]) -> list[Turn]:
    """Those of an answer of ours. Not checked: a model may have named a function that nobody could."""
    return [_turn_of_output(item) for item in items]


def _turn_of_output(item: Mapping[str, Any]) -> Turn:
    if item["type"] == "function_call":
        return _call_turn(item["call_id"], item["name"], item["arguments"])
    member = "content" if item["type"] == "message" else "reasoning_content"
    return {"role": "assistant", member: "".join(part["text"] for part in item["content"])}


def messages_of(turns: Iterable[Turn]) -> list[dict[str, Any]]:
    """Text or reasoning behind text begins a message of its own; calls belong to what is before them.

    Takes time in proportion to the turns, though all of them may become one message.
    """
    messages: list[dict[str, Any]] = []
    for turn in map(_growing, turns):
        last = messages[-1] if messages else None
        if last is None or not _is_assistant(last) or not _is_assistant(turn):
            messages.append(turn)
        elif "tool_calls" in turn:
            last.setdefault("tool_calls", []).extend(turn["tool_calls"])
        elif "content" in last:
            messages.append(turn)
        elif "reasoning_content" in turn and "reasoning_content" in last:
            last["reasoning_content"] += turn["reasoning_content"]
        else:
            last.update(turn)
    for message in messages:
        if "reasoning_content" in message:
            message["reasoning_content"] = "\n".join(message["reasoning_content"])
    return messages


def _growing(turn: Turn) -> dict[str, Any]:
    """A copy, whose reasoning is a list of texts, and whose calls are a list of its own."""
    message = dict(turn)
    if "reasoning_content" in turn:
        message["reasoning_content"] = [turn["reasoning_content"]]
    if "tool_calls" in turn:
        message["tool_calls"] = list(turn["tool_calls"])
    return message


def _is_assistant(message: Mapping[str, Any]) -> bool:
    return bool(message["role"] == "assistant")


def _parse_item(item: Any, where: str) -> Turn | None:
    """None: there is nothing in it for the model."""
    if not isinstance(item, dict):
        raise _invalid(where, "must be an object")
    kind = item.get("type")
    if kind is None and "role" in item:
        kind = "message"
    if not isinstance(kind, str):
        raise _invalid(f"{where}.type", "must be a string")
    parse = _PARSERS.get(kind)
    if parse is None:
        known = ", ".join(_PARSERS)
        raise UnsupportedParameter(f"{where}.type: only {known} are supported.", param=f"{where}.type")
    return parse(item, where)


def _message(item: dict[str, Any], where: str) -> Turn:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise _invalid(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
    return {"role": role, "content": _text_of(item.get("content"), f"{where}.content")}


def _function_call(item: dict[str, Any], where: str) -> Turn:
    arguments = item.get("arguments")
    if not isinstance(arguments, str):
        raise _invalid(f"{where}.arguments", "must be a string")
    name = _short_string(item.get("name"), f"{where}.name", _MAX_NAME_CHARS)
    call_id = _short_string(item.get("call_id"), f"{where}.call_id", _MAX_ID_CHARS)
    return _call_turn(call_id, name, arguments)


def _call_turn(call_id: str, name: str, arguments: str) -> Turn:
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def _function_call_output(item: dict[str, Any], where: str) -> Turn:
    call_id = _short_string(item.get("call_id"), f"{where}.call_id", _MAX_ID_CHARS)
    return {"role": "tool", "tool_call_id": call_id, "content": _text_of(item.get("output"), f"{where}.output")}


def _reasoning(item: dict[str, Any], where: str) -> Turn | None:
    """What was thought, or else its summary."""
    for member, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        parts = item.get(member)
        if parts:
            return {"role": "assistant", "reasoning_content": _joined(parts, {kind: "text"}, f"{where}.{member}")}
    if item.get("encrypted_content"):
        where = f"{where}.encrypted_content"
        raise UnsupportedParameter(f"{where}: only reasoning with content can be replayed.", param=where)
    return None


_PARSERS: dict[str, Callable[[dict[str, Any], str], Turn | None]] = {
    "message": _message,
    "function_call": _function_call,
    "function_call_output": _function_call_output,
    "reasoning": _reasoning,
}


def _text_of(content: Any, where: str) -> str:
    return content if isinstance(content, str) else _joined(content, _TEXT_PARTS, where)


def _joined(parts: Any, kinds: Mapping[str, str], where: str) -> str:
    """By line ends, as chat joins them."""
    if not isinstance(parts, list):
        raise _invalid(where, "must be a string or a list of content parts")
    return "\n".join(_part(part, kinds, f"{where}[{index}]") for index, part in enumerate(parts))


def _part(part: Any, kinds: Mapping[str, str], where: str) -> str:
    if not isinstance(part, dict):
        raise _invalid(where, "must be an object")
    kind = part.get("type")
    if not isinstance(kind, str):
        raise _invalid(f"{where}.type", "must be a string")
    if kind not in kinds:
        raise UnsupportedParameter(f"{where}.type: only {', '.join(kinds)} are supported.", param=f"{where}.type")
    text = part.get(kinds[kind])
    if not isinstance(text, str):
        raise _invalid(f"{where}.{kinds[kind]}", "must be a string")
    return text


def _short_string(value: Any, where: str, limit: int) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= limit:
        raise _invalid(where, f"must be a string of 1 to {limit} characters")
    return value


def _invalid(where: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{where} {what}.", param=where)
