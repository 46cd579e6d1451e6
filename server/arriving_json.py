"""A JSON body on its way: embeddings in it are decoded and made into rows while the rest is still to come. Filled by
`request_body`.

A string is taken out of the body once 64 KiB of it have come and what stands before it says that it is an embedding: if
the body ended there, it would be one (`_place_of` has that parsed, closed in the few ways in which it can be). That is
certain but for what the client may yet take back with a second `type` or `data` of the same object, say. A name that no
client knows is left in the string's place; it is put back where that is found in the parsed body, and let go of where
it isn't: of a key that comes twice the last one counts, whether the first was taken out or not. What is not base64 is
refused at once, before it is known what else is wrong, or whether it will be overwritten.

Everything else stays in the body, for `long_strings` and the parser: what comes before its `type`, or behind more JSON
than is worth being parsed twice, or has escapes from its beginning on.
"""

from __future__ import annotations

import binascii
import re
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pybase64

from server.arriving_base64 import ArrivingBase64
from server.arriving_file import ArrivingFile
from server.attachments import embedding_parts
from server.errors import InvalidRequest
from server.file_tensor import EmbeddingError
from server.long_strings import LongString
from server.pages import Gathered

MIN_BYTES = 64 * 1024
"""Of a string that is taken out."""
MAX_BEFORE = 64 * 1024
"""Of JSON before such a string: what is parsed twice."""
_MAX_NODES = 1024
_MARK = b'"'
_BEFORE_BYTES = 256
_ENDS = {
    re.compile(rb'"data"\s{0,64}:\s{0,64}\Z'): (b'"}]}', b'"}]}]}', b'"}]]}'),
    re.compile(rb'"prompt_embeds"\s{0,64}:\s{0,64}\Z'): (b'"}',),
    re.compile(rb'(?:"prompt_embeds"\s{0,64}:\s{0,64}\[|",)\s{0,64}\Z'): (b'"]}',),
}
"""What stands before the string's first mark, and how the body could end behind the string: as a part in a prompt or an
input, in a message, in one of several prompts; as an embedding; as one of several, the first or a later one."""
_NAME_CHARS = 64
"""More than our names have."""


class ArrivingString(LongString):
    """One that has been taken out. There is nothing in its `data`."""

    file: ArrivingFile

    __slots__ = ("file",)

    @classmethod
    def of_file(cls, file: ArrivingFile) -> ArrivingString:
        string = cls("(an embedding)")
        string.data, string.file = memoryview(b""), file
        return string


class ArrivingJson:
    """`add` what comes, then `view` and `put_back`; and `close`, if it is refused. On the event loop."""

    def __init__(self, new_file: Callable[[], ArrivingFile]) -> None:
        self._new_file = new_file
        self._secret = secrets.token_hex(16)
        self._json = Gathered()
        """All but the strings that have been taken out."""
        self._is_looking = True
        self._mark = -1
        """Where the last quotation mark is in `_json`."""
        self._string: ArrivingBase64 | None = None
        """The one that is coming."""
        self._where = ""
        self._files: dict[str, ArrivingFile] = {}

    def __len__(self) -> int:
        return len(self._json)

    @property
    def view(self) -> memoryview:
        """Nothing is added any more. With a short string in the place of each that was taken out."""
        return self._json.view

    @property
    def has_files(self) -> bool:
        return bool(self._files)

    def add(self, chunk: bytes) -> None:
        """Raises InvalidRequest for an embedding that is not base64, Unavailable where there is no memory."""
        try:
            self._add(chunk)
        except EmbeddingError as error:
            raise InvalidRequest(f"{self._where}: {error}.", param=self._where) from None

    def _add(self, chunk: bytes) -> None:
        start = 0
        if self._string is not None:
            start = chunk.find(_MARK)
            self._string.add(memoryview(chunk)[: None if start < 0 else start])
            if start < 0:
                return
            self._string.end()
            self._string = None
        self._json.add(memoryview(chunk)[start:])
        if self._is_looking:
            self._look(chunk, start)

    async def keep_up(self) -> None:
        if self._string is not None:
            await self._string.file.keep_up()

    def _look(self, chunk: bytes, start: int) -> None:
        mark = chunk.rfind(_MARK, start)
        if mark >= 0:
            self._mark = len(self._json) - len(chunk) + mark
        if self._mark > MAX_BEFORE:
            self._is_looking = False
        elif self._mark >= 0 and len(self._json) - self._mark > MIN_BYTES:
            self._is_looking = self._take_out()

    def _take_out(self) -> bool:
        """What comes behind the last mark, if it is an embedding."""
        head, text = bytes(self._json.view[: self._mark + 1]), self._json.view[self._mark + 1 :]
        name = f"({self._secret}{len(self._files)})"
        where = _place_of(head, name) if _is_base64(text[: len(text) // 4 * 4]) else None
        if where is None:
            return False
        self._where = where
        self._files[name] = file = self._new_file()
        self._string = ArrivingBase64(file)
        self._string.add(text)
        self._json = Gathered()
        self._json.add(head + name.encode())
        return True

    def put_back(self, value: dict[str, Any]) -> None:
        """Every string where its name is in `value`, which `view` was parsed to. Where that is no embedding's place any
        more nobody reads it, as nobody would read the string."""
        files = dict(self._files)
        for holder, key, _ in _places(value):
            name = holder[key]
            file = files.pop(name, None) if len(name) <= _NAME_CHARS else None
            if file is not None:
                holder[key] = ArrivingString.of_file(file)
        for file in files.values():
            file.close()

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _is_base64(text: memoryview) -> bool:
    try:
        return len(pybase64.b64decode(text, validate=True)) == len(text) // 4 * 3
    except binascii.Error:
        return False


def _place_of(head: bytes, name: str) -> str | None:
    """Where in the request the string is that begins behind `head`; None if that is no embedding's place, or more is
    needed to say so."""
    if head.count(b"{") + head.count(b"[") > _MAX_NODES:
        return None
    before = head[-1 - _BEFORE_BYTES : -1]
    for end in (end for opening, ends in _ENDS.items() if opening.search(before) for end in ends):
        try:
            value = msgspec.json.decode(b"%b%b%b" % (head, name.encode(), end))
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            continue
        if isinstance(value, dict):
            return next((where for holder, key, where in _places(value) if holder[key] == name), None)
    return None


def _places(value: dict[str, Any]) -> Iterator[tuple[Any, Any, str]]:
    """Where strings may be that are embeddings: what holds each, under which key or index, and its name in errors."""
    embeds = value.get("prompt_embeds")
    if isinstance(embeds, str):
        yield value, "prompt_embeds", "prompt_embeds"
    elif isinstance(embeds, list):
        yield from ((embeds, index, "prompt_embeds") for index, each in enumerate(embeds) if isinstance(each, str))
    for part, where in embedding_parts(value):
        if isinstance(part.get("data"), str):
            yield part, "data", f"{where}.data"
