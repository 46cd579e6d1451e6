"""Tokens to text: the whole text, no half characters, for every kind of tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from server.detokenizer import ByteDetokenizer, Detokenizer, StreamDetokenizer
from server.vocabulary import Vocabulary
from tests.models import EOS_ID, VOCAB_SIZE
from tests.server.fakes import byte_ids, ids_of, tokenizer

BYTE_LEVEL = tokenizer().vocabulary
TEXTS = ["plain", "🫠 melts", "\u9f9c", "e\u0301 and é", "mixed 龜🫠龜 text", "👩‍👩‍👧"]


def sentencepiece() -> Backend:
    """The decoder of Llama 2, Mistral and Gemma: marks for spaces, byte tokens for what has no piece of its own."""
    pieces = ["<unk>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), "▁Hello", "▁world", "▁", "H", "i"]
    backend = Backend(models.BPE({piece: index for index, piece in enumerate(pieces)}, [], byte_fallback=True))
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def wordpiece() -> Backend:
    backend = Backend(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2, "now": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    return backend


def id_of(backend: Backend, piece: str) -> int:
    token_id = backend.token_to_id(piece)
    assert token_id is not None
    return token_id


def feed(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_characters_split_over_tokens_come_whole(text: str) -> None:
    pieces = feed(ByteDetokenizer(BYTE_LEVEL), byte_ids(text.encode()))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=20))
def test_any_ids_give_what_the_library_gives(ids: list[int]) -> None:
    plain = [token_id for token_id in ids if not BYTE_LEVEL.is_special(token_id)]
    assert "".join(feed(ByteDetokenizer(BYTE_LEVEL), plain)) == BYTE_LEVEL.decode(plain, skip_special=True)


def test_half_a_character_is_not_lost_at_the_end() -> None:
    pieces = feed(ByteDetokenizer(BYTE_LEVEL), byte_ids("🫠".encode()[:3]))
    assert pieces == ["", "", "", "\ufffd"]


def test_half_a_character_that_nothing_completes_comes_out() -> None:
    pieces = feed(ByteDetokenizer(BYTE_LEVEL), byte_ids("🫠".encode()[:2] + b"ok"))
    assert "".join(pieces) == "\ufffdok"


def test_a_real_replacement_character_does_not_block() -> None:
    ids = byte_ids("\ufffd".encode()) + ids_of("a")
    assert feed(ByteDetokenizer(BYTE_LEVEL), ids) == ["", "", "\ufffd", "a", ""]


def test_a_character_begun_by_the_prompt_is_completed() -> None:
    first, *rest = byte_ids("é".encode())
    assert feed(ByteDetokenizer(BYTE_LEVEL, prompt_tail=[*ids_of("caf"), first]), rest) == ["é", ""]


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "a<eos>b")])
def test_special_tokens(skip: bool, text: str) -> None:
    ids = [*ids_of("a"), EOS_ID, *ids_of("b")]
    assert "".join(feed(ByteDetokenizer(BYTE_LEVEL, skip_special=skip), ids)) == text


def test_a_special_token_ends_a_character() -> None:
    ids = [byte_ids("é".encode())[0], EOS_ID, byte_ids("é".encode())[1]]
    assert feed(ByteDetokenizer(BYTE_LEVEL), ids) == ["", "\ufffd", "\ufffd", ""]


def test_ids_without_a_token_are_empty() -> None:
    assert feed(ByteDetokenizer(BYTE_LEVEL), [VOCAB_SIZE + 5, 2**31, -1]) == ["", "", "", ""]


def test_byte_fallback() -> None:
    backend = sentencepiece()
    vocabulary = Vocabulary(backend)
    assert vocabulary.is_exact
    ids = [id_of(backend, "▁Hello"), *(2 + value for value in "🫠".encode()), id_of(backend, "▁world")]
    pieces = feed(ByteDetokenizer(vocabulary, at_start=True), ids)
    assert pieces == ["Hello", "", "", "", "🫠", " world", ""]
    assert "".join(pieces) == backend.decode(ids)


def test_only_the_first_token_of_a_text_loses_its_space() -> None:
    backend = sentencepiece()
    hello = id_of(backend, "▁Hello")
    assert feed(ByteDetokenizer(Vocabulary(backend), at_start=True), [hello, hello]) == ["Hello", " Hello", ""]
    assert feed(ByteDetokenizer(Vocabulary(backend)), [hello]) == [" Hello", ""]


def test_other_decoders_use_the_library() -> None:
    backend = wordpiece()
    vocabulary = Vocabulary(backend)
    assert not vocabulary.is_exact
    assert "".join(feed(StreamDetokenizer(backend), [1, 2, 3])) == "playing now"
    assert vocabulary.bytes_of(1) == b"play"


def test_the_library_flushes_what_it_held() -> None:
    backend = tokenizer().transformers.backend_tokenizer
    pieces = feed(StreamDetokenizer(backend), byte_ids(b"ok" + "🫠".encode()[:3]))
    assert pieces == ["o", "k", "", "", "", "\ufffd"]


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=12))
def test_the_library_never_raises(ids: list[int]) -> None:
    feed(StreamDetokenizer(tokenizer().transformers.backend_tokenizer), ids)


def test_an_added_token_with_a_space_is_literal() -> None:
    backend = Backend.from_str(tokenizer().transformers.backend_tokenizer.to_str())
    backend.add_tokens(["two words"])
    assert Vocabulary(backend).bytes_of(VOCAB_SIZE) == b"two words"
