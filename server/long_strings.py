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
from collections.abc import Iterator
from typing import Any

from server.pages import give_turn

MIN_BYTES = 64 * 1024
"""Shorter strings take less time to parse than to look for."""

_TURN_BYTES = 4 << 20
"""Searched without giving other threads a turn: 0.3 ms."""
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

    def __init__(self, body: memoryview) -> None:
        self._secret = secrets.token_hex(16)
        """No client knows it, so no other string of the body is taken for one of ours."""
        self._strings: dict[str, LongString] = {}
        pieces: list[bytes | memoryview] = []
        copied = 0
        for start, end in _long_strings(body):
            name = f"({self._secret}{len(self._strings)})"
            self._strings[name] = LongString.of(body[start:end])
            pieces += (body[copied:start], name.encode())
            copied = end
        self.rest: bytes | memoryview = b"".join([*pieces, body[copied:]]) if pieces else body

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


def _long_strings(body: memoryview) -> Iterator[tuple[int, int]]:
    """Where the insides of strings begin and end that are long, have no escapes and are the value of an embedding's
    key, or in a list that is."""
    last_end = -1
    for start, end, has_escapes in _long_gaps(body):
        before = bytes(body[max(0, start - 1 - _KEY_BYTES) : start - 1])
        follows = last_end >= 0 and _NEXT_IN_LIST.fullmatch(body, last_end + 1, start - 1) is not None
        if (follows or _KEY.search(before)) and not has_escapes:
            last_end = end
            yield start, end
        else:
            last_end = -1


def _long_gaps(body: memoryview) -> Iterator[tuple[int, int, bool]]:
    """What is between two quotation marks and at least `MIN_BYTES` long, and whether it has a backslash. Of the many
    short gaps of an ordinary body one in `MIN_BYTES` is looked at."""
    position = 0
    while position < len(body):
        mark = bytes(body[position : position + MIN_BYTES]).rfind(b'"')
        if mark < 0:
            position += MIN_BYTES
            _perhaps_give_turn(position)
            continue
        start = position + mark + 1
        position, has_escapes = _closing_mark(body, start)
        if position < 0:
            return
        if position >= start + MIN_BYTES:
            yield start, position, has_escapes


def _closing_mark(body: memoryview, start: int) -> tuple[int, bool]:
    """The next quotation mark, -1 if there is none, and whether a backslash comes before it. Looks at copies, which
    stay in the cache: a memoryview can't be searched."""
    has_escapes = False
    for begin in range(start, len(body), MIN_BYTES):
        piece = bytes(body[begin : begin + MIN_BYTES])
        found = piece.find(b'"')
        has_escapes = has_escapes or piece.find(b"\\", 0, len(piece) if found < 0 else found) >= 0
        if found >= 0:
            return begin + found, has_escapes
        _perhaps_give_turn(begin)
    return -1, has_escapes


def _perhaps_give_turn(position: int) -> None:
    """Called every `MIN_BYTES`."""
    if position // _TURN_BYTES != (position - MIN_BYTES) // _TURN_BYTES:
        give_turn()
