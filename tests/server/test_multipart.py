"""multipart/form-data as it comes: in pieces of any size, malformed in every way, and judged by another parser."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
from collections.abc import AsyncIterator, Sequence
from email.parser import BytesParser
from email.policy import HTTP

import httpx
import pytest

from server.errors import APIError, InvalidRequest
from server.multipart import MAX_FIELDS, MAX_HEADER_BYTES, MAX_NAME_CHARS, _Reader, read_fields

BOUNDARY = "frontier"
TYPE = f"multipart/form-data; boundary={BOUNDARY}"


def read(chunks: Sequence[bytes], content_type: str = TYPE) -> dict[str, bytes]:
    async def stream() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    fields = asyncio.run(read_fields(stream(), content_type))
    return {name: bytes(value) for name, value in fields.items() if isinstance(value, memoryview)}


def field(name: str, value: bytes, *headers: str) -> bytes:
    head = "\r\n".join((f'Content-Disposition: form-data; name="{name}"', *headers))
    return b"--%b\r\n%b\r\n\r\n%b\r\n" % (BOUNDARY.encode(), head.encode(), value)


def body(*fields: bytes) -> bytes:
    return b"".join(fields) + f"--{BOUNDARY}--\r\n".encode()


def test_what_httpx_sends_is_what_comes_out() -> None:
    """An independent writer, and the standard library's parser of e-mail as an independent reader."""
    values = {"request": b'{"a": 1}', "rows": random.Random(1).randbytes(5000), "ü": b"\r\n--\r\n", "leer": b""}
    request = httpx.Request("POST", "http://a", files={name: (f"{name}.bin", data) for name, data in values.items()})
    sent, content_type = request.read(), request.headers["content-type"]
    assert read([sent], content_type) == values
    message = BytesParser(policy=HTTP).parsebytes(b"Content-Type: " + content_type.encode() + b"\r\n\r\n" + sent)
    assert len(list(message.iter_parts())) == len(values)


def test_the_same_in_pieces_of_any_size() -> None:
    """Values that look like the boundary, or nearly, across the border of two pieces."""
    near = b"".join(b"\r\n--frontier"[:n] + b"\r\n--frontie" for n in range(12))
    sent = body(field("a", near), field("b", b""), field("c", b"\r" * 20 + b"\r\n--frontiex--\r\n"))
    expected = read([sent])
    assert expected["a"] == near
    for at in range(len(sent) + 1):
        assert read([sent[:at], sent[at:]]) == expected
    assert read([sent[at : at + 1] for at in range(len(sent))]) == expected


def test_headers_that_change_nothing() -> None:
    sent = body(field("a", b"x", "Content-Type: application/json", "Content-Transfer-Encoding: binary"))
    assert read([sent]) == {"a": b"x"}
    assert read([b"\r\n" + sent]) == {"a": b"x"}  # as some clients begin
    assert read([sent], f'Multipart/Form-Data; charset=utf-8; boundary="{BOUNDARY}"') == {"a": b"x"}
    assert read([sent + b"an epilogue"]) == {"a": b"x"}
    assert read([f"--{BOUNDARY}--\r\n".encode()]) == {}


WHOLE = body(field("a", b"value"), field("b", b"value"))
MALFORMED = {
    "empty": b"",
    "JSON": b'{"prompt": "secret"}',
    "another boundary": WHOLE.replace(BOUNDARY.encode(), b"limit"),
    "line ends": WHOLE.replace(b"\r\n", b"\n"),
    "a preamble": b"secret" + WHOLE,
    "no headers": WHOLE.replace(b'Content-Disposition: form-data; name="b"', b""),
    "no name": WHOLE.replace(b'; name="b"', b""),
    "an empty name": WHOLE.replace(b'"b"', b'""'),
    "a file only": WHOLE.replace(b'name="b"', b'filename="b"'),
    "an attachment": WHOLE.replace(b"form-data", b"attachment"),
    "a name that is not UTF-8": WHOLE.replace(b'"b"', b'"\xff"'),
    "a long name": body(field("n" * (MAX_NAME_CHARS + 1), b"")),
    "twice": body(field("a", b"1"), field("a", b"2")),
    "twice, with one between": body(field("a", b"1"), field("b", b""), field("a", b"1")),
    "two dispositions": body(field("a", b"1", 'Content-Disposition: form-data; name="b"')),
    "base64": body(field("a", b"AAAA", "Content-Transfer-Encoding: base64")),
    "quoted": body(field("a", b"AAAA", "Content-Transfer-Encoding: Quoted-Printable")),
    "a long header": body(field("a", b"", "X: " + "x" * MAX_HEADER_BYTES)),
    "a header without end": body(field("a", b""))[:-30] + b"\r\n--frontier\r\n" + b"x" * 100_000,
    "many headers": body(field("a", b"", *(f"X-{n}: x" for n in range(20)))),
    "a header without a name": body(field("a", b"", ": x")),
    "NUL in a header": body(field("a", b"", "X\0: x")),
    "many fields": body(*(field(f"f{n}", b"") for n in range(MAX_FIELDS + 1))),
}


@pytest.mark.parametrize("sent", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed(sent: bytes) -> None:
    for chunks in ([sent], [sent[at : at + 7] for at in range(0, len(sent), 7)]):
        with pytest.raises(InvalidRequest) as caught:
            read(chunks)
        assert (caught.value.status, caught.value.code) == (400, "invalid_multipart")
        assert "secret" not in caught.value.message
        assert len(caught.value.message) < 250


def test_cut_anywhere() -> None:
    for end in range(WHOLE.index(b"--frontier--") + len(b"--frontier--")):
        with pytest.raises(InvalidRequest):
            read([WHOLE[:end]])


@pytest.mark.parametrize(
    "content_type",
    [
        "multipart/form-data",
        "multipart/form-data; boundary=",
        f"multipart/form-data; boundary={'b' * 71}",
        "multipart/form-data; boundary*=utf-8''frontier",
        'multipart/form-data; boundary="\xfc"',
        f"multipart/form-data; boundary=frontier; a={'b' * MAX_HEADER_BYTES}",
    ],
)
def test_boundaries_that_are_none(content_type: str) -> None:
    with pytest.raises(InvalidRequest):
        read([WHOLE], content_type)


def test_an_error_of_the_stream_is_passed_on() -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield WHOLE[:20]
        raise APIError(499, "gone")

    with pytest.raises(APIError, match="gone"):
        asyncio.run(read_fields(broken(), TYPE))


@pytest.mark.parametrize("sent", [WHOLE, WHOLE[:-30], MALFORMED["twice"]])
def test_nothing_waits_for_the_collector(sent: bytes) -> None:
    """Parser and fields are in no cycle: a hundred megabytes go when the last who needs them does."""
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(InvalidRequest):
            read([sent])
        readers = [each for each in gc.get_objects() if type(each) is _Reader]
        assert not any(reader._fields or reader._field for reader in readers)
    finally:
        gc.enable()
