"""Whatever the model says, whatever stops it and however its tokens are packed: a stream adds up to the whole answer,
its log-probabilities included, and these fit the text. Through both routes, to the last byte of JSON."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.models import EOS_ID, TURN_ID
from tests.server.completion_calls import complete
from tests.server.fakes import Line, api, byte_ids, ids_of, tokenizer
from tests.server.test_chat import HELLO, chat

# One token a byte splits every character that is not ASCII; some bytes are missing or alone.
_PIECES = st.one_of(
    st.text("aé龜🫠 \n", max_size=3).map(lambda text: byte_ids(text.encode())),
    st.text("the answer is", max_size=6).map(ids_of),
    st.binary(max_size=2).map(byte_ids),
    st.sampled_from([[EOS_ID], [TURN_ID]]),
)
_TOKENS = st.lists(_PIECES, max_size=6).map(lambda pieces: [token for piece in pieces for token in piece])
_PACKING = st.integers(1, 4)


def texts_before(tokens: Sequence[int]) -> list[str]:
    """The text in front of each token, and of all of them, by the standard library's decoder. Special tokens have no
    text, and what is incomplete before one stays so."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    vocabulary = tokenizer().vocabulary
    texts = [""]
    for token in tokens:
        special = vocabulary.is_special(token)
        raw = b"" if special else vocabulary.bytes_of(token)
        texts.append(texts[-1] + decoder.decode(raw, final=special))
        if special:
            decoder.reset()
    return [*texts[:-1], texts[-1] + decoder.decode(b"", final=True)]


@st.composite
def _said_and_stops(draw: st.DrawFn) -> tuple[list[int], list[str]]:
    """Tokens, and stop strings that their text has in it, or nearly: such a one holds text back, and then lets go."""
    tokens = draw(_TOKENS)
    text = texts_before(tokens)[-1]
    stops = []
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, max(len(text) - 1, 0)))
        piece = text[start : start + draw(st.integers(1, 4))]
        stops.append(piece + draw(st.sampled_from(["", "", "~"])) or "~")
    return tokens, stops


@given(_said_and_stops(), _PACKING, st.booleans(), st.booleans())
def test_completions(said: tuple[list[int], list[str]], packing: int, include_stop: bool, as_ids: bool) -> None:
    tokens, stops = said
    body = {
        "prompt": [5],
        "max_tokens": len(tokens) or 1,
        "stop": stops,
        "include_stop_str_in_output": include_stop,
        "ignore_eos": True,
        "logprobs": 1,
        "return_token_ids": True,
        "return_tokens_as_token_ids": as_ids,
    }
    with api(lambda _ids, _choice: Line(tokens, "length"), tokens_per_event=packing) as (client, _):
        (choice,) = complete(client, **body)["choices"]  # compares it with the stream
    made, found = choice["token_ids"], choice["logprobs"]
    *before, all_of_it = texts_before(made)
    assert made == tokens[: len(made)]
    assert {len(values) for values in found.values()} == {len(made)}
    if choice["stop_reason"] is None:
        assert (made, choice["text"], found["text_offset"]) == (tokens, all_of_it, list(map(len, before)))
    else:
        assert all_of_it.startswith(choice["text"]) and choice["stop_reason"] in all_of_it
        assert choice["text"].endswith(choice["stop_reason"]) or not include_stop
        # The tokens of what was cut off stand at the end of what is left.
        assert found["text_offset"] == [min(len(text), len(choice["text"])) for text in before]
    if as_ids:
        assert found["tokens"] == [f"token_id:{token}" for token in made]


@given(_TOKENS, _PACKING, st.booleans(), st.booleans())
def test_plain_texts(tokens: list[int], packing: int, stopped: bool, routed: bool) -> None:
    """Nobody asks for more than text. The last token may be a stop token that is not special: it has a text, which
    isn't sent."""
    stop_ids = tokens[-1:] if stopped and tokens.count(tokens[-1] if tokens else -1) == 1 else []
    body: dict[str, Any] = {"max_tokens": len(tokens) or 1, "ignore_eos": True, "stop_token_ids": stop_ids}
    shown = tokens[:-1] if stop_ids else tokens
    with api(lambda _ids, _choice: Line(tokens, "length"), tokens_per_event=packing) as (client, _):
        if routed:
            text = chat(client, messages=HELLO, **body)["choices"][0]["message"]["content"]
        else:
            text = complete(client, prompt=[5], **body)["choices"][0]["text"]
    assert text == texts_before(shown)[-1]


@given(_said_and_stops(), _PACKING)
def test_chat(said: tuple[list[int], list[str]], packing: int) -> None:
    tokens, stops = said
    body: dict[str, Any] = {
        "messages": HELLO,
        "max_completion_tokens": len(tokens) or 1,
        "stop": stops,
        "ignore_eos": True,
        "logprobs": True,
        "return_token_ids": True,
    }
    with api(lambda _ids, _choice: Line(tokens, "length"), tokens_per_event=packing) as (client, _):
        (choice,) = chat(client, **body)["choices"]  # compares it with the stream
    made, entries = choice["token_ids"], choice["logprobs"]["content"]
    vocabulary = tokenizer().vocabulary
    assert [bytes(entry["bytes"]) for entry in entries] == [vocabulary.bytes_of(token) for token in made]
    assert not any("\ufffd" in entry["token"] for entry in entries)
    text = texts_before(made)[-1]
    if choice["stop_reason"] is not None:
        assert text.startswith(choice["message"]["content"] + choice["stop_reason"])
        return
    assert (made, choice["message"]["content"]) == (tokens, text)
    if not any(map(vocabulary.is_special, made)):
        assert b"".join(bytes(entry["bytes"]) for entry in entries).decode(errors="replace") == text
