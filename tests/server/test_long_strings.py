"""Long strings are cut out of a body only where they are embeddings, and nothing else changes."""

from __future__ import annotations

import base64
import json
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server import long_strings
from server.body import parse_large, parse_object
from server.embeddings import EmbeddingError, decode_base64_embedding
from server.errors import InvalidRequest
from server.long_strings import LongString

LONG = "A" * long_strings.MIN_BYTES


def parse(value: Any) -> dict[str, Any]:
    return parse_large(memoryview(json.dumps(value).encode()))


def cut(value: Any) -> list[LongString]:
    """All that are in a parsed body."""
    if isinstance(value, LongString):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [each for inner in values for each in cut(inner)]


def restored(value: Any) -> Any:
    if isinstance(value, LongString):
        return bytes(value.data).decode()
    if isinstance(value, dict):
        return {key: restored(each) for key, each in value.items()}
    return [restored(each) for each in value] if isinstance(value, list) else value


PART = {"type": "prompt_embeds", "data": LONG}
TAKEN = {
    "embedding": ({"prompt_embeds": LONG}, 1),
    "embeddings": ({"model": "x", "prompt_embeds": [LONG, LONG + "B", LONG], "n": 1}, 3),
    "a short one in between": ({"prompt_embeds": [LONG, "short", LONG]}, 1),
    "parts": ({"prompt": [{"type": "text", "text": "x"}, PART, PART]}, 2),
    "prompts of parts": ({"prompt": [[PART], [PART, {"type": "text", "text": LONG}]]}, 2),
    "chat": ({"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": [PART]}]}, 1),
    "images": (
        {"messages": [{"content": [{"type": "image_url", "image_url": url} for url in (LONG, {"url": LONG})]}]},
        2,
    ),
    "an image in a prompt": ({"prompt": [PART, {"type": "image_url", "image_url": {"detail": "low", "url": LONG}}]}, 2),
    "stored": ({"data": LONG}, 1),
    "with text": ({"prompt": LONG, "user": LONG, "prompt_embeds": LONG}, 1),
}


@pytest.mark.parametrize(("value", "count"), TAKEN.values(), ids=TAKEN.keys())
def test_embeddings_are_cut(value: Any, count: int) -> None:
    parsed = parse(value)
    assert len(cut(parsed)) == count
    assert restored(parsed) == value


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": LONG},
        {"metadata": {"data": LONG}},
        {"messages": [{"role": "user", "content": [{"type": "image", "data": LONG}]}]},
        {"prompt": [{"type": "text", "text": {"data": LONG}}], "prompt_embeds": LONG},
        {"prompt_embeds": {"prompt_embeds": LONG}},
        {"tools": [{"data": LONG}], "prompt_embeds": [LONG, LONG]},
        {"prompt_embeds": LONG + '"'},
        {"prompt_embeds": "\\" + LONG},
        {"prompt_embeds": '"' + LONG},
        {"prompt_embeds": LONG + "é\n"},
        {"a": '"prompt_embeds":' + LONG},
        {'a"prompt_embeds': LONG},
        {"prompt_embeds": "short"},
    ],
)
def test_what_is_somewhere_else_or_has_escapes_stays_a_string(value: Any) -> None:
    parsed = parse(value)
    assert cut(parsed) == []
    assert parsed == value


@pytest.mark.parametrize(
    "body",
    [
        '{"prompt_embeds": "' + LONG,
        '{"prompt_embeds": "' + LONG + '"',
        '{"prompt_embeds": "x"' + LONG + '"}',
        '{"prompt_embeds": ' + LONG + "}",
        '{"prompt_embeds": "' + LONG + '" "' + LONG + '"}',
        '["prompt_embeds", "' + LONG + '"]',
        '{"prompt_embeds": ["' + LONG + '", "' + LONG + '": 1]}',
        "9" * (1 << 20),
    ],
)
def test_what_is_not_json_does_not_become_json(body: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_large(memoryview(body.encode()))


def test_the_last_of_duplicate_keys_wins() -> None:
    body = f'{{"prompt_embeds": "{LONG}", "prompt_embeds": "{LONG}B"}}'.encode()
    assert parse_large(memoryview(body)) == {"prompt_embeds": LONG + "B"}


@pytest.mark.parametrize("damage", [b"\x00", b"\xff", b" ", b"\n", b"-", "é".encode()])
def test_what_is_not_base64_is_refused_when_it_is_decoded(damage: bytes) -> None:
    body = memoryview(b'{"prompt_embeds": "' + LONG.encode() + damage + LONG.encode() + b'"}')
    parsed = parse_large(body)
    with pytest.raises(EmbeddingError, match="not valid base64"):
        decode_base64_embedding(parsed["prompt_embeds"], hidden_size=1 << 16, dtype="float32", max_rows=8)


def test_no_second_body_is_made() -> None:
    body = memoryview(b'{"prompt_embeds": "' + base64.b64encode(bytes(30 << 20)) + b'"}')
    tracemalloc.start()
    try:
        parsed = parse_large(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(parsed["prompt_embeds"].data) == 40 << 20
    assert peak < 1 << 20


# --- properties, with the limit so low that hypothesis finds the places where it matters ------------------------------

STRINGS = st.one_of(
    st.text(max_size=6),
    st.sampled_from(["prompt_embeds", "data", "messages", "content", "prompt", '"', "\\", '",', '\\"data', 'data":']),
    st.text(alphabet="AB+/=", min_size=6, max_size=40),
)
KEYS = st.one_of(st.sampled_from(["prompt_embeds", "data", "messages", "content", "prompt"]), STRINGS)
VALUES = st.recursive(
    st.one_of(STRINGS, st.none(), st.integers(-9, 9)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=12,
)


@given(value=st.dictionaries(KEYS, VALUES, max_size=4), indent=st.sampled_from([None, 0, 3]), escape=st.booleans())
def test_any_body_says_the_same(value: dict[str, Any], indent: int | None, escape: bool) -> None:
    body = json.dumps(value, indent=indent, ensure_ascii=escape).encode(errors="surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_strings, "MIN_BYTES", 5)
        patch.setattr(long_strings, "_TURN_BYTES", 7)
        try:
            expected = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        assert restored(parse_large(memoryview(body))) == expected


@given(
    pieces=st.lists(
        st.sampled_from(
            [
                "{",
                "}",
                "[",
                "]",
                ":",
                ",",
                '"',
                "\\",
                '"data"',
                '"prompt_embeds"',
                '"messages"',
                '"content"',
                " ",
                "AAAAAAAA",
                '"AAAAAAAA"',
                '"data":"AAAAAAAA"',
                "1",
                "null",
            ]
        ),
        max_size=14,
    )
)
def test_whatever_is_not_json_is_refused_all_the_same(pieces: list[str]) -> None:
    body = ("{" + "".join(pieces) + "}").encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_strings, "MIN_BYTES", 5)
        try:
            expected = parse_object(body)
        except InvalidRequest:
            with pytest.raises(InvalidRequest):
                parse_large(memoryview(body))
        else:
            assert restored(parse_large(memoryview(body))) == expected
