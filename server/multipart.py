"""Reads a multipart/form-data body: a few named fields, each as the bytes that it came as. Called by `request_body`.

python-multipart's streaming parser finds the boundaries; what it finds is put into one buffer a field, or into an
`ArrivingFile`, so that a body takes its own size in memory and nothing is written to disk (Starlette's form() would put
it into temporary files). How large it may be is the body limit's business; here a body is refused for its shape, at the
first byte that is wrong.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from server.arriving_file import ArrivingFile
from server.errors import APIError, InvalidRequest, bounded
from server.pages import Gathered

MEDIA_TYPE = "multipart/form-data"
MAX_FIELDS = 256
MAX_NAME_CHARS = 256
MAX_HEADERS = 8
MAX_HEADER_BYTES = 1024
_MAX_BOUNDARY_CHARS = 70  # RFC 2046
_MAX_TOLD_CHARS = 64
_ENCODINGS = (b"", b"binary", b"7bit", b"8bit")
"""Of a field: those that change nothing."""

# It would log every malformed body, with pieces of it.
logging.getLogger("python_multipart").setLevel(logging.CRITICAL)

Fields = dict[str, memoryview | ArrivingFile]


def close_files(fields: Mapping[str, object]) -> None:
    """What is refused is let go of at once, whoever still holds the error."""
    for field in fields.values():
        if isinstance(field, ArrivingFile):
            field.close()


async def read_fields(
    chunks: AsyncIterator[bytes], content_type: str, new_file: Callable[[str], ArrivingFile | None] = lambda name: None
) -> Fields:
    """The fields in their order. `new_file`: what takes the field of this name, if it is a tensor file.

    Raises InvalidRequest for a body that is malformed, cut or has a field twice, and what `chunks` raises; then nothing
    of it is kept."""
    reader = _Reader(_boundary(content_type), new_file)
    try:
        async for chunk in chunks:
            reader.feed(chunk)
            await reader.keep_up()
        return reader.finish()
    finally:
        reader.close()


def _boundary(content_type: str) -> bytes:
    if len(content_type) > MAX_HEADER_BYTES:  # parsing takes time by the square of it, on the event loop
        raise _malformed(f"its content type must have at most {MAX_HEADER_BYTES} characters")
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if not 0 < len(boundary) <= _MAX_BOUNDARY_CHARS or not boundary.isascii():
        raise _malformed(f"its content type must name a boundary of 1 to {_MAX_BOUNDARY_CHARS} characters")
    return boundary


class _Reader:
    """`feed` what comes, then `finish`. Both raise InvalidRequest."""

    def __init__(self, boundary: bytes, new_file: Callable[[str], ArrivingFile | None]) -> None:
        self._new_file = new_file
        self._fields: dict[str, Gathered | ArrivingFile] = {}
        self._field: Gathered | ArrivingFile = Gathered()
        """The one that is being read."""
        self._headers: dict[bytes, bytes] = {}
        self._header_name = self._header_value = b""
        self._complete = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._on_header_name,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers,
                "on_part_data": self._on_data,
                "on_end": self._on_end,
            },
            max_header_count=MAX_HEADERS,
            max_header_size=MAX_HEADER_BYTES,
        )

    def feed(self, chunk: bytes) -> None:
        try:
            self._parser.write(chunk)
        except FormParserError:
            raise _malformed("see RFC 7578") from None

    async def keep_up(self) -> None:
        if isinstance(self._field, ArrivingFile):
            await self._field.keep_up()

    def finish(self) -> Fields:
        if not self._complete:
            raise _malformed("it ends before its last boundary")
        fields, self._fields = self._fields, {}
        return {name: field.view if isinstance(field, Gathered) else field for name, field in fields.items()}

    def close(self) -> None:
        """Lets go of everything: reader and parser are a cycle, and megabytes must not wait for the collector."""
        close_files(self._fields)
        self._fields, self._field = {}, Gathered()
        self._parser.callbacks = {}

    # --- called by the parser ---------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._headers = {}
        self._header_name = self._header_value = b""

    def _on_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        name = self._header_name.lower()
        if name in self._headers:
            raise _malformed("a field has a header twice")
        self._headers[name] = self._header_value
        self._header_name = self._header_value = b""

    def _on_headers(self) -> None:
        disposition, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        if disposition != b"form-data" or b"name" not in options:
            raise _malformed('every field needs the header Content-Disposition: form-data; name="…"')
        encoding = self._headers.get(b"content-transfer-encoding", b"").strip().lower()
        if encoding not in _ENCODINGS:
            raise _malformed("its fields must not have a Content-Transfer-Encoding: they are binary as they are")
        try:
            name = options[b"name"].decode()
        except UnicodeDecodeError:
            raise _malformed("a field's name is not UTF-8") from None
        self._add(name)

    def _add(self, name: str) -> None:
        if not 0 < len(name) <= MAX_NAME_CHARS:
            raise _malformed(f"a field's name must have 1 to {MAX_NAME_CHARS} characters")
        if name in self._fields:
            raise _malformed(f"it has the field {bounded(name, _MAX_TOLD_CHARS)!r} twice")
        if len(self._fields) == MAX_FIELDS:
            raise _malformed(f"it has more than {MAX_FIELDS} fields")
        file = self._new_file(name)
        self._field = self._fields[name] = Gathered() if file is None else file

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        self._field.add(memoryview(data)[start:end])

    def _on_end(self) -> None:
        self._complete = True


def _malformed(what: str) -> APIError:
    return InvalidRequest(f"The multipart body is not right: {what}.", code="invalid_multipart")
