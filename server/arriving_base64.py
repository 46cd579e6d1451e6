"""A tensor file in base64 on its way: decoded as it comes, and made into rows by an `ArrivingFile`. Filled by
`arriving_json`, read by `inputs`."""

from __future__ import annotations

import binascii
import re

import msgspec
import pybase64

from server.arriving_file import ArrivingFile
from server.embeddings import NOT_BASE64
from server.file_tensor import EmbeddingError

_CUT_ESCAPE = re.compile(rb"\\(?:u[0-9a-fA-F]{0,3})?\Z")


class ArrivingBase64:
    """`add` the inside of a JSON string, then `end`. Both raise EmbeddingError for what is not base64, at once.

    On the event loop: decoding holds the interpreter's lock wherever it is done (17 µs for 256 KiB), and what has just
    come is in the cache.
    """

    def __init__(self, file: ArrivingFile) -> None:
        self.file = file
        self._rest = b""
        """Of four characters, the first ones."""
        self._escape = b""
        """The same of an escape."""
        self._is_padded = False

    def add(self, text: memoryview) -> None:
        """As it stands in the JSON. Raises what `ArrivingFile` does, too."""
        if self._escape or not self._take(text):
            self._take_escaped(text)

    def end(self) -> None:
        if self._rest or self._escape:
            raise EmbeddingError(NOT_BASE64)

    def _take(self, text: bytes | memoryview) -> bool:
        """False if there is something in it that isn't base64; nothing has been done then."""
        size = (len(self._rest) + len(text)) // 4 * 4
        fill = -len(self._rest) % 4 if size else 0
        first = self._rest + bytes(text[:fill]) if size else b""
        whole = text[fill : max(fill, size - len(self._rest))]
        rest = bytes(text[fill + len(whole) :]) if size else self._rest + bytes(text)
        if (text and self._is_padded) or b"\\" in rest:
            return False
        try:
            runs = [pybase64.b64decode(each, validate=True) for each in (first, whole)]
        except binascii.Error:
            return False
        is_padded = sum(map(len, runs)) < size // 4 * 3
        if is_padded and (rest or (whole and len(runs[0]) < len(first) // 4 * 3)):  # and more behind the padding
            return False
        self._rest, self._is_padded = rest, self._is_padded or is_padded
        for run in runs:
            if run:
                self.file.add(run)
        return True

    def _take_escaped(self, text: memoryview) -> None:
        """Serialisers escape `/`, `+` or `=`, each in its own way."""
        raw = self._escape + bytes(text)
        cut = _CUT_ESCAPE.search(raw, max(0, len(raw) - len(rb"\u002")))
        end = len(raw) if cut is None else cut.start()
        self._escape = raw[end:]
        try:
            plain = msgspec.json.decode(b'"%b"' % raw[:end], type=str).encode("ascii")
        except (msgspec.MsgspecError, UnicodeError):  # what is no string is no base64
            raise EmbeddingError(NOT_BASE64) from None
        if not self._take(plain):
            raise EmbeddingError(NOT_BASE64)
