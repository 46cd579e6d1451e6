"""Prompt embeddings and images in a JSON body, left where they are while the rest is parsed. Used by `body`.

A parser makes a string of every string, and holds the interpreter's lock meanwhile: 85 million characters of base64
stop every stream of the process for 200 ms. So long strings are cut out of the body's bytes first, a short one is
parsed in the place of each, and what comes out at the places where embeddings and images belong is a `LongString`,
which `embeddings` and `image_file` decode from the body's bytes.

What is a long string can be told from its neighbourhood alone. Between two quotation marks that follow each other with
none in between there is either the inside of a string or what stands between two strings, and a key with its colon
stands before the first mark only where it opens a string. (Marks that are escaped have a backslash before them; strings
with a backslash anywhere are left alone.) A body that is not JSON does not become JSON by this, nor the other way
round: text that has no meaning outside of a string is replaced by other such text.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator
from typing import Any

MIN_BYTES = 64 * 1024
"""Shorter strings take less time to parse than to look for."""

_SLICE = 8 << 20
"""Bytes searched without giving other threads a turn: about a millisecond."""
_KEY = re.compile(rb'(?<!\\)"(?:prompt_embeds|data|url|image_url)"\s{0,64}:\s{0,64}(?:\[\s{0,64})?\Z')
_NEXT_IN_LIST = re.compile(rb"\s{0,64},\s{0,64}")
_KEY_BYTES = 256
"""More than `_KEY` can match."""


class LongString(str):
    """A string whose characters are still in the body. As a `str` it is a few words that stand for it."""

    data: memoryview
    """The characters in UTF-8, without escapes; nobody has looked at them yet."""

    __slots__ = ("data",)

    @classmethod
    def of(cls, data: memoryview) -> LongString:
        string = cls(f"({len(data)} bytes)")
        string.data = data
        return string


class CutBody:
    """`rest`: the body with a short string in the place of each long one."""

    def __init__(self, body: bytearray) -> None:
        self._secret = secrets.token_hex(16)
        """No client knows it, so no other string of the body is taken for one of ours."""
        self._strings: dict[str, LongString] = {}
        pieces: list[bytes | memoryview] = []
        view, copied = memoryview(body).toreadonly(), 0
        for start, end in _long_strings(body):
            name = f"({self._secret}{len(self._strings)})"
            self._strings[name] = LongString.of(view[start:end])
            pieces += (view[copied:start], name.encode())
            copied = end
        self.rest: bytes | bytearray = b"".join([*pieces, view[copied:]]) if pieces else body

    def put_back(self, value: dict[str, Any]) -> bool:
        """Put every long string where its place is in `value`, which `rest` was parsed to. False if there is one
        somewhere else: nobody there knows what to do with it."""
        if not self._strings:
            return True  # of a body that is a million token ids, say: none of them is looked at
        count = self._member(value, "data") + self._member(value, "prompt_embeds")
        parts = [*_parts(value.get("prompt")), *_parts(value.get("input"))]
        for message in _objects(value.get("messages")):
            parts += _objects(message.get("content"))
        count += sum(self._member(part, "data") for part in parts if part.get("type") == "prompt_embeds")
        images = [part for part in parts if part.get("type") == "image_url"]
        count += sum(self._member(image, "image_url") for image in images)
        count += sum(self._member(url, "url") for image in images if isinstance(url := image.get("image_url"), dict))
        return count == len(self._strings)

    def _member(self, holder: dict[str, Any], name: str) -> int:
        """How many are put into this member, which is a string or a list of them."""
        value = holder.get(name)
        if isinstance(value, str) and value in self._strings:
            holder[name] = self._strings[value]
            return 1
        if not isinstance(value, list):
            return 0
        strings = [self._strings.get(each) if isinstance(each, str) else None for each in value]
        holder[name] = [each if string is None else string for each, string in zip(value, strings, strict=True)]
        return len(strings) - strings.count(None)


def _parts(prompt: Any) -> Iterator[dict[str, Any]]:
    """Of a prompt that is a list of parts, or of several."""
    if isinstance(prompt, list):
        yield from _objects(prompt)
        for each in prompt:
            if isinstance(each, list):
                yield from _objects(each)


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, list):
        yield from (each for each in value if isinstance(each, dict))


def _long_strings(body: bytearray) -> Iterator[tuple[int, int]]:
    """Where the insides of strings begin and end that are long, have no escapes and are the value of an embedding's
    key, or in a list that is."""
    last_end = -1
    for start, end in _long_gaps(body):
        before = bytes(body[max(0, start - 1 - _KEY_BYTES) : start - 1])
        follows = last_end >= 0 and _NEXT_IN_LIST.fullmatch(body, last_end + 1, start - 1) is not None
        if (follows or _KEY.search(before)) and _find(body, b"\\", start, end) < 0:
            last_end = end
            yield start, end
        else:
            last_end = -1


def _long_gaps(body: bytearray) -> Iterator[tuple[int, int]]:
    """What is between two quotation marks and at least `MIN_BYTES` long. Of the many short gaps of an ordinary body one
    in `MIN_BYTES` is looked at."""
    position = 0
    while position < len(body):
        mark = body.rfind(b'"', position, position + MIN_BYTES)
        if mark < 0:
            position += MIN_BYTES
            continue
        position = _find(body, b'"', mark + 1, len(body))
        if position < 0:
            return
        if position - mark > MIN_BYTES:
            yield mark + 1, position


def _find(body: bytearray, byte: bytes, start: int, end: int) -> int:
    """`body.find`, with turns for other threads."""
    for begin in range(start, end, _SLICE):
        found = body.find(byte, begin, min(end, begin + _SLICE))
        if found >= 0:
            return found
        time.sleep(0)
    return -1
