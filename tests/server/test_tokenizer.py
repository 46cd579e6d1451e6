"""The tokenizer: the same ids and texts as transformers', off the loop where it takes long."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from server.tokenizer import Tokenizer
from tests.models import BOS_ID, EOS_ID, build_tokenizer
from tests.server.fakes import byte_ids, ids_of, tokenizer


def encode(text: str, *, special: bool = True, given_tokenizer: Tokenizer | None = None) -> list[int]:
    return asyncio.run((given_tokenizer or tokenizer()).encode(text, add_special_tokens=special))


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_as_transformers_does(text: str) -> None:
    ids = encode(text)
    assert ids == tokenizer().transformers(text).input_ids
    assert tokenizer().decode(ids, skip_special_tokens=False) == text


def test_special_tokens_around_the_text() -> None:
    # A tokenizer with a beginning-of-sequence token, as most have.
    from tokenizers.processors import TemplateProcessing

    own = build_tokenizer()
    own.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS_ID)])
    wrapped = Tokenizer(own)
    assert encode("hi", given_tokenizer=wrapped) == [BOS_ID, *ids_of("hi")]
    assert encode("hi", special=False, given_tokenizer=wrapped) == ids_of("hi")


def test_special_tokens_in_the_text_are_themselves() -> None:
    assert encode("a<eos>b") == [*ids_of("a"), EOS_ID, *ids_of("b")]


def test_padding_and_truncation_of_the_file_are_off() -> None:
    own = build_tokenizer()
    own.backend_tokenizer.enable_truncation(3)
    own.backend_tokenizer.enable_padding(length=64)
    assert len(encode("a long text", given_tokenizer=Tokenizer(own))) == len(ids_of("a long text"))


@pytest.mark.parametrize(("length", "in_thread"), [(4096, False), (4097, True)])
def test_long_texts_are_encoded_in_a_thread(length: int, in_thread: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = Tokenizer(build_tokenizer())
    threads = []
    original = wrapped._encode

    def record(*arguments: Any) -> list[int]:
        threads.append(threading.current_thread())
        return original(*arguments)

    monkeypatch.setattr(wrapped, "_encode", record)
    assert len(encode("9" * length, given_tokenizer=wrapped)) == length
    assert (threads[0] is not threading.main_thread()) == in_thread
    wrapped.close()


def test_others_run_while_a_long_text_is_encoded() -> None:
    """The interpreter's lock is not held for all of it: every stream of the process would stand still."""
    given_tokenizer, turns, done = tokenizer(), 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not done.wait(0.0005):
            turns += 1

    other = threading.Thread(target=count)
    other.start()
    before = turns
    ids = given_tokenizer._encode("The quick brown fox. " * 50_000, True, None)
    counted = turns - before
    done.set()
    other.join()
    assert len(ids) > 50_000
    assert counted > 10


def test_a_text_that_cannot_fit_is_known_by_its_length() -> None:
    longest = max(len(name) for name in tokenizer().transformers.get_vocab())
    assert not tokenizer().is_longer_than("x" * (10 * longest), 10)
    assert tokenizer().is_longer_than("x" * (10 * longest + 1), 10)


def test_a_text_whose_tokens_have_no_longest_is_not_judged() -> None:
    own = build_tokenizer()
    own.add_tokens([AddedToken("<pause>", rstrip=True)])  # takes any amount of white space with it
    assert not Tokenizer(own).is_longer_than(" " * 100_000, 1)


def test_names() -> None:
    assert tokenizer().names([*ids_of(" is"), EOS_ID, 10**6]) == ["Ġis", "<eos>", ""]


def test_a_detokenizer_goes_on_where_the_prompt_ended() -> None:
    first, second = byte_ids("é".encode())
    assert tokenizer().detokenizer([*ids_of("a long prompt of words"), first]).push(second) == "é"
