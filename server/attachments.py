"""Puts the tensor fields of a multipart body where its JSON names them: `{"type": "prompt_embeds", "part": "field"}`
becomes a part whose `data` is the field. Called by `request_body`; what becomes of it then is `segments`' affair.
`arriving_json` asks for the same places (`embedding_parts`).

Looks only where parts can be: in the list of a completion's prompt or of an embedding's input, in the lists of a batch,
and in the content of chat messages. Each field is named once: named twice, a small body could become a large prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from server.arriving_file import ArrivingFile
from server.errors import InvalidRequest, bounded
from server.segments import Attachment

_MAX_TOLD_CHARS = 64


def attach(body: Mapping[str, Any], fields: Mapping[str, ArrivingFile]) -> None:
    """Changes the parts in `body` in place. Raises InvalidRequest where a part names no field or one that another part
    has named, or a field is named by no part."""
    unused = dict(fields)
    for part, where in embedding_parts(body):
        name = part.get("part")
        if name is None:
            continue
        where += ".part"
        if not isinstance(name, str) or name not in fields:
            raise InvalidRequest(f"{where}: the body has no such field.", param=where)
        if name not in unused:
            raise InvalidRequest(
                f"{where}: another part has named this field already. (Stored embeddings can be named often.)",
                param=where,
            )
        if part.get("data") is not None:
            raise InvalidRequest(f"{where} excludes data.", param=where)
        del part["part"]
        part["data"] = Attachment(unused.pop(name))
    if unused:
        name = bounded(next(iter(unused)), _MAX_TOLD_CHARS)
        raise InvalidRequest(f"No part of the prompt names the field {name!r}.", param="request")


def embedding_parts(body: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Every part of type prompt_embeds, and where it is."""
    for field in ("prompt", "input"):
        prompt = body.get(field)
        if isinstance(prompt, list):
            yield from _of_list(prompt, field)
            for index, each in enumerate(prompt):
                if type(each) is list:
                    yield from _of_list(each, f"{field}[{index}]")
    messages = body.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            yield from _of_list(content, f"messages[{index}].content")


def _of_list(parts: list[Any], where: str) -> Iterator[tuple[dict[str, Any], str]]:
    for index, part in enumerate(parts):
        if type(part) is dict and part.get("type") == "prompt_embeds":
            yield part, f"{where}[{index}]"
