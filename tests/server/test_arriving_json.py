"""A JSON body that comes in pieces of any size says what it says as a whole: embeddings are taken out of it only where
they are certain to be embeddings, and nothing else changes."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from server import arriving_json
from server.arriving_file import ArrivingFile
from server.arriving_json import ArrivingJson, ArrivingString
from server.body import parse_large
from server.embeddings import decode_base64_embedding
from server.errors import InvalidRequest
from server.rows import Rows
from tests.server.embedding_files import cut

HIDDEN = 512
FILE = safetensors.numpy.save({"rows": np.random.default_rng(1).standard_normal((2000, HIDDEN), np.float32)})
"""4 MB."""
TEXT = base64.b64encode(FILE).decode()
PART = {"type": "prompt_embeds", "data": TEXT}


class Kept(ArrivingFile):
    """Keeps what came as it came."""

    def __init__(self) -> None:
        super().__init__(HIDDEN, "bfloat16", 4096)
        self.data = b""

    def add(self, chunk: bytes | memoryview) -> None:
        self.data += chunk
        super().add(chunk)


async def add(body: ArrivingJson, chunks: Sequence[bytes]) -> None:
    for chunk in chunks:
        body.add(chunk)


def arrive(chunks: Sequence[bytes]) -> tuple[dict[str, Any], ArrivingJson]:
    body = ArrivingJson(Kept)
    try:
        asyncio.run(add(body, chunks))
        value = parse_large(body.view)
        body.put_back(value)
    except BaseException:
        body.close()
        raise
    return value, body


def taken(value: Any) -> list[ArrivingString]:
    if isinstance(value, ArrivingString):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [each for inner in values for each in taken(inner)]


def restored(value: Any, arrived: ArrivingJson | None = None) -> Any:
    """With what was taken as the bytes that it decodes to, and all other strings that might be such likewise.
    `arrived`: has the strings whose names are still in `value`."""
    if isinstance(value, ArrivingString):
        file = value.file
        assert isinstance(file, Kept)
        return file.data
    if isinstance(value, str):
        if arrived is not None and isinstance(left := arrived._files.get(value), Kept):
            return left.data
        text = bytes(value.data).decode() if hasattr(value, "data") else value
        try:
            return base64.b64decode(text, validate=True)
        except ValueError:
            return text
    if isinstance(value, dict):
        return {key: restored(each, arrived) for key, each in value.items()}
    return [restored(each, arrived) for each in value] if isinstance(value, list) else value


TAKEN = {
    "embedding": ({"model": "x", "prompt_embeds": TEXT, "n": 1}, 1),
    "embeddings": ({"prompt_embeds": [TEXT, TEXT[:400_000], TEXT], "n": 1}, 3),
    "a short one in between": ({"prompt_embeds": [TEXT, "QUJD", TEXT]}, 2),
    "parts": ({"prompt": [{"type": "text", "text": 'x"[{'}, PART, {"type": "token_ids", "token_ids": [1]}, PART]}, 2),
    "prompts of parts": ({"prompt": [[PART], [5, 6], [PART, PART]]}, 3),
    "chat": ({"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": [PART, PART]}]}, 2),
    "an input": ({"input": [PART]}, 1),
}


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize(("value", "count"), TAKEN.values(), ids=TAKEN.keys())
def test_embeddings_are_taken_out(value: Any, count: int, indent: int | None) -> None:
    body = json.dumps(value, indent=indent).encode()
    for sizes in ((262_144,), (65_536, 1000), (100_003,)):
        parsed, arrived = arrive(cut(body, *sizes))
        assert len(taken(parsed)) == count
        assert restored(parsed) == restored(value)
        assert len(arrived) < 200_000  # the rest of the body


def rows_of(string: ArrivingString) -> Rows:
    return asyncio.run(string.file.rows(4096))


def test_the_rows_are_those_of_the_whole_text() -> None:
    parsed, _ = arrive(cut(json.dumps({"prompt": [PART]}).encode(), 200_000))
    (string,) = taken(parsed)
    assert rows_of(string) == decode_base64_embedding(TEXT, hidden_size=HIDDEN, dtype="bfloat16", max_rows=4096)


OTHERS = [
    {"prompt": TEXT},
    {"prompt": [{"data": TEXT, "type": "prompt_embeds"}]},
    {"prompt": [{"type": "text", "data": TEXT}]},
    {"prompt": [[{"type": "text", "text": TEXT}, [{"type": "prompt_embeds", "data": TEXT}]]]},
    {"data": TEXT},
    {"metadata": {"prompt_embeds": TEXT}},
    {"metadata": {"data": TEXT}, "prompt_embeds": TEXT},
    {"prompt_embeds": {"prompt_embeds": TEXT}},
    {"prompt_embeds": [[TEXT]]},
    {"messages": [{"role": "user", "content": {"type": "prompt_embeds", "data": TEXT}}]},
    {"messages": [{"role": "user", "content": TEXT}]},
    {"tools": [{"type": "prompt_embeds", "data": TEXT}]},
    {"x": '"prompt_embeds": ', "y": TEXT},
    {'"prompt_embeds': TEXT},
    {'x\\"prompt_embeds': TEXT},
    {"user": "x" * 70_000, "prompt_embeds": TEXT},
    {"user": [1] * 40_000, "prompt_embeds": TEXT},
    {"user": [[]] * 2_000, "prompt_embeds": TEXT},
    {"prompt_embeds": "data:;base64," + TEXT},
    {"prompt_embeds": TEXT[:1001] + "é" + TEXT},
]


@pytest.mark.parametrize("value", OTHERS)
def test_what_is_no_embedding_for_certain_stays_in_the_body(value: Any) -> None:
    parsed, _ = arrive(cut(json.dumps(value).encode(), 50_000))
    assert taken(parsed) == []
    assert restored(parsed) == restored(value)


@pytest.mark.parametrize("escape", ["\\/", "\\u002f", "\\u002F"])
@pytest.mark.parametrize("first", [0, 30_000, 200_000])
def test_escapes_are_what_they_stand_for(escape: str, first: int) -> None:
    """From the beginning on the string is left in the body; later they are decoded with it, wherever they are cut."""
    text = TEXT[:first] + TEXT[first:].replace("/", escape)
    for size in (65_537, 99_999):
        parsed, _ = arrive(cut(b'{"prompt_embeds": "%b"}' % text.encode(), size, 7, 1, 1, 3, 2))
        assert len(taken(parsed)) == (first == 200_000)
        assert restored(parsed) == {"prompt_embeds": FILE}


@pytest.mark.parametrize("count", range(3))
def test_padding_may_be_escaped_and_cut(count: int) -> None:
    file = FILE[: 300_000 + count]
    text = base64.b64encode(file).replace(b"=", b"\\u003d")
    body = b'{"prompt_embeds": "%b"}' % text
    for last in range(1, 20):
        parsed, _ = arrive([*cut(body[:-last], 100_000), body[-last:]])
        assert [len(taken(parsed)), restored(parsed)] == [1, {"prompt_embeds": file}]


@pytest.mark.parametrize(
    "wrong",
    ["\x00", " ", "\n", "-", "é", "=", "==", "====", '\\"', "\\\\", "\\n", "\\u0041\\", "\\u00e9", "\\ud800", "\\q"],
)
@pytest.mark.parametrize("at", [200_000, 300_001, len(TEXT) - 1])
def test_what_is_not_base64_is_refused_at_once(wrong: str, at: int) -> None:
    text = (TEXT[:at] + wrong + TEXT[at:]).encode()
    for size in (65_536, 99_999):
        with pytest.raises(InvalidRequest, match=r"^prompt\[1\]\.data: .* not valid base64") as caught:
            arrive(
                cut(
                    b'{"prompt": [{"type": "text", "text": "x"}, {"type": "prompt_embeds", "data": "%b"}]}' % text, size
                )
            )
        assert caught.value.param == "prompt[1].data"


@pytest.mark.parametrize("wrong", ["\\q", "\\\\"])
@pytest.mark.parametrize("length", range(2))
def test_what_is_not_base64_is_refused_where_the_first_piece_ends(wrong: str, length: int) -> None:
    """Of the piece that is taken out of the body, up to three characters have not been looked at."""
    head = b'{"prompt_embeds": "%b%b' % (TEXT[: 70_000 + length].encode(), wrong.encode())
    with pytest.raises(InvalidRequest, match=r"^prompt_embeds: .* not valid base64"):
        arrive([head, b'%b"}' % TEXT.encode()])


@pytest.mark.parametrize("more", ["AAAA", "A", "=", TEXT])
@pytest.mark.parametrize("cut_at", range(-5, 5))
def test_nothing_comes_behind_padding(more: str, cut_at: int) -> None:
    head, text = b'{"prompt_embeds": "', base64.b64encode(FILE[:300_001])
    body = head + text + more.encode() + b'"}'
    end = len(head) + len(text) + cut_at
    with pytest.raises(InvalidRequest, match=r"^prompt_embeds: .* not valid base64"):
        arrive([body[:200_000], body[200_000:end], body[end:]])


@pytest.mark.parametrize("length", range(1, 4))
def test_a_group_that_is_cut_is_refused(length: int) -> None:
    text = TEXT[: 400_000 + length]
    with pytest.raises(InvalidRequest, match=r"^prompt_embeds: .* not valid base64"):
        arrive(cut(b'{"prompt_embeds": ["%b"]}' % text.encode(), 100_000))


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ('{"prompt_embeds": "%"}', "prompt_embeds"),
        ('{"prompt_embeds": ["QQ==", "%"]}', "prompt_embeds"),
        ('{"prompt": [{"type": "prompt_embeds", "data": "%"}]}', "prompt[0].data"),
        ('{"input": [5, [], {"type": "prompt_embeds", "data": "%"}]}', "input[2].data"),
        ('{"prompt": [[1], [{"type": "text"}, {"type": "prompt_embeds", "data": "%"}]]}', "prompt[1][1].data"),
        ('{"messages": [{}, {"content": [{"type": "prompt_embeds", "data": "%"}]}]}', "messages[1].content[0].data"),
    ],
)
def test_the_error_says_where_it_is(value: str, where: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        arrive(cut(value.replace("%", TEXT + "!").encode(), 100_000))
    assert caught.value.param == where


@pytest.mark.parametrize(
    "value",
    [
        '{"prompt": [{"type": "prompt_embeds", "data": "%", "type": "text", "text": "x"}]}',
        '{"prompt": [{"type": "prompt_embeds", "data": "%", "data": 5}]}',
        '{"prompt": [{"type": "prompt_embeds", "data": "%"}], "prompt": "x"}',
        '{"prompt_embeds": "%", "prompt_embeds": null}',
        '{"prompt_embeds": "%", "prompt_embeds": "%"}',
        '{"prompt_embeds": ["%"], "prompt_embeds": ["%"]}',
    ],
)
def test_of_a_key_that_comes_twice_the_last_one_counts(value: str) -> None:
    """Wherever the body is cut: in one piece nothing is taken out of it."""
    body = value.replace("%", TEXT).encode()
    for size in (100_000, len(body)):
        parsed, arrived = arrive(cut(body, size))
        assert restored(parsed, arrived) == restored(msgspec.json.decode(body))
        kept = [string.file for string in taken(parsed)]
        assert all((file._values is not None) == (file in kept) for file in arrived._files.values())


@pytest.mark.parametrize(
    "body",
    [
        '{"prompt_embeds": "%',
        '{"prompt_embeds": "%"',
        '{"prompt_embeds": "%" "x"}',
        '{"prompt_embeds": "%": 1}',
        '{"prompt_embeds": ["%": 1]}',
        '{"prompt_embeds": "x"%"}',
        '{"prompt_embeds": %}',
        '["prompt_embeds", "%"]',
        '"prompt_embeds": "%"}',
        "%",
    ],
)
def test_what_is_not_json_does_not_become_json(body: str) -> None:
    for size in (50_000, 1_000_000, 10_000_000):
        with pytest.raises(InvalidRequest):
            arrive(cut(body.replace("%", TEXT).encode(), size))


def test_what_is_refused_is_let_go_of() -> None:
    body = ArrivingJson(Kept)
    asyncio.run(add(body, cut(json.dumps({"prompt_embeds": [TEXT, TEXT]}).encode(), 100_000)))
    files = list(body._files.values())
    assert all(file._values is not None for file in files)
    body.close()
    assert len(files) == 2
    assert all(file._values is None for file in files)


# --- properties, with the limit so low that hypothesis finds the places where it matters ------------------------------

STRINGS = st.one_of(
    st.text(max_size=6),
    st.sampled_from(["prompt_embeds", "data", "type", "content", "prompt", '"', "\\", '",', '\\"data', 'data":']),
    st.text(alphabet="AB+/", min_size=4, max_size=40),
)
KEYS = st.one_of(st.sampled_from(["prompt_embeds", "data", "messages", "content", "prompt", "type"]), STRINGS)
PARTS = st.builds(
    lambda text: {"type": "prompt_embeds", "data": text}, st.text(alphabet="AB+/", min_size=4, max_size=40)
)
VALUES = st.recursive(
    st.one_of(STRINGS, PARTS, st.none(), st.integers(-9, 9)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=12,
)


def chunks_of(body: bytes, seed: int) -> list[bytes]:
    draw = random.Random(seed)
    return cut(body, *(draw.choice((1, 2, 3, 5, 9, 30)) for _ in range(9)))


@given(
    value=st.dictionaries(KEYS, VALUES, max_size=4),
    indent=st.sampled_from([None, 0, 3]),
    slash=st.sampled_from([b"/", b"\\/", b"\\u002f"]),
    seed=st.integers(0, 1 << 16),
)
def test_any_body_says_the_same(value: dict[str, Any], indent: int | None, slash: bytes, seed: int) -> None:
    body = json.dumps(value, indent=indent).encode().replace(b"/", slash)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arriving_json, "MIN_BYTES", 5)
        try:
            expected = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        try:
            parsed, _ = arrive(chunks_of(body, seed))
        except InvalidRequest as error:
            # What began like base64 and was none.
            assert "not valid base64" in error.message
            return
        assert restored(parsed) == restored(expected)


PIECES = ["{", "}", "[", "]", ":", ",", '"', "\\", '"data"', '"prompt_embeds"', '"prompt"', '"type"', " ", "1", "null"]
PIECES += ["AAAAAAAA", '"AAAAAAAA"', '"data":"AAAAAAAA"', '"type":"prompt_embeds"', '"prompt":[{', '"prompt_embeds":["']
PIECES += ["}]}"]


@given(pieces=st.lists(st.sampled_from(PIECES), max_size=14), seed=st.integers(0, 1 << 16))
def test_whatever_is_not_json_is_refused_all_the_same(pieces: list[str], seed: int) -> None:
    body = ("{" + "".join(pieces) + "}").encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arriving_json, "MIN_BYTES", 5)
        try:
            expected = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            with pytest.raises(InvalidRequest):
                arrive(chunks_of(body, seed))
            return
        try:
            parsed, arrived = arrive(chunks_of(body, seed))
        except InvalidRequest as error:
            assert "not valid base64" in error.message
        else:
            assert restored(parsed, arrived) == restored(expected)
