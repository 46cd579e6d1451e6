"""A choice: tokens in, deltas out, whichever way the tokens were packed into events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.messages import End, TokenLogprobs
from server.choices import Choice, ChoiceOptions, Delta, TokenRecord
from server.errors import APIError
from tests.models import EOS_ID, VOCAB_SIZE
from tests.server.fakes import byte_ids, ids_of, tokenizer


def choice(*, echo: str = "", prompt: Sequence[int] = (), **options: Any) -> Choice:
    return Choice(0, tokenizer().detokenizer(prompt), ChoiceOptions(**options), echo=echo)


def logprobs(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -1.0, 1, (), ())


def end(reason: Any = "length", stop_token: int | None = None, message: str = "") -> End:
    return End(1, 0, reason, stop_token, message)


def run(
    subject: Choice, tokens: Sequence[int], last: End, sizes: Sequence[int] = (), *, with_logprobs: bool = False
) -> list[Delta]:
    """Feed `tokens` in events of these sizes (then one by one); `last` comes with the last of them."""
    events, rest = [], list(tokens)
    for size in sizes:
        events.append(rest[:size])
        rest = rest[size:]
    events += [[token] for token in rest]
    deltas = []
    for position, event in enumerate(events or [[]]):
        entries = [logprobs(token) for token in event] if with_logprobs else []
        delta = subject.feed(event, entries, last if position >= len(events) - 1 else None)
        if delta is not None:
            deltas.append(delta)
    return deltas


def records_of(deltas: Sequence[Delta]) -> list[TokenRecord]:
    return [record for delta in deltas for record in delta.tokens]


def text(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


@given(
    st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=20),
    st.lists(st.integers(0, 4), max_size=6),
    st.lists(st.text("aeint \n", min_size=1, max_size=3), max_size=3),
    st.booleans(),
    st.integers(0, 5),
)
def test_the_packing_changes_nothing(
    tokens: list[int], sizes: list[int], stops: list[str], include_stop: bool, min_tokens: int
) -> None:
    options: dict[str, Any] = {
        "stop": tuple(stops),
        "include_stop": include_stop,
        "min_tokens": min_tokens,
        "keep_records": True,
    }
    alone, packed = choice(**options), choice(**options)
    one = run(alone, tokens, end(), with_logprobs=True)
    other = run(packed, tokens, end(), sizes, with_logprobs=True)
    assert text(one) == text(other)
    assert [record for delta in one for record in delta.tokens] == [
        record for delta in other for record in delta.tokens
    ]
    assert (one[-1].finish_reason, one[-1].stop_reason) == (other[-1].finish_reason, other[-1].stop_reason)
    for subject, deltas in ((alone, one), (packed, other)):
        assert [delta.is_first for delta in deltas] == [True, *[False] * (len(deltas) - 1)]
        assert [delta.finish_reason is None for delta in deltas] == [*[True] * (len(deltas) - 1), False]
        records = records_of(deltas)
        assert len(records) == subject.num_tokens == sum(delta.num_new_tokens for delta in deltas)
        assert [record.token_id for record in records] == tokens[: subject.num_tokens]
        offsets = [record.offset for record in records]
        assert offsets == sorted(offsets)
        assert all(offset <= len(text(deltas)) for offset in offsets)


def test_tokens_come_out_with_their_text() -> None:
    subject = choice(stop=("nothing",), keep_records=True)
    deltas = run(subject, byte_ids("no é".encode()), end())
    for delta in deltas:
        ids = [record.token_id for record in delta.tokens]
        assert tokenizer().decode(ids, skip_special_tokens=True) == delta.text


@pytest.mark.parametrize(("include_stop", "expected"), [(False, "one "), (True, "one two")])
def test_a_stop_string_over_several_tokens(include_stop: bool, expected: str) -> None:
    subject = choice(stop=("two",), include_stop=include_stop)
    deltas = run(subject, byte_ids(b"one two three"), end())
    assert text(deltas) == expected
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "two")
    assert subject.num_tokens == len("one two")
    assert subject.feed(byte_ids(b"x"), [], end()) is None


def test_a_stop_string_on_the_last_token_wins() -> None:
    deltas = run(choice(stop=("!",)), byte_ids(b"a!"), end("length"))
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "!")


def test_what_was_held_back_comes_out_at_the_end() -> None:
    deltas = run(choice(stop=("two",)), byte_ids(b"one tw"), end("length"))
    assert text(deltas) == "one tw"
    assert deltas[-1].finish_reason == "length"


def test_half_a_character_at_the_end() -> None:
    assert text(run(choice(), byte_ids("é".encode()[:1]), end())) == "\ufffd"


def test_stop_strings_before_min_tokens_do_not_count() -> None:
    assert text(run(choice(stop=("a",), min_tokens=3), byte_ids(b"aaba"), end())) == "aab"
    assert text(run(choice(stop=("a",), min_tokens=2), byte_ids(b"aab"), end())) == "a"


@pytest.mark.parametrize(
    ("stop_token", "include", "expected", "reason"),
    [
        (EOS_ID, False, "a", None),
        (EOS_ID, True, "a", None),
        (ids_of("b")[0], False, "a", ids_of("b")[0]),
        (ids_of("b")[0], True, "ab", ids_of("b")[0]),
    ],
)
def test_stop_tokens(stop_token: int, include: bool, expected: str, reason: int | None) -> None:
    subject = choice(include_stop=include, client_stop_ids=frozenset(ids_of("b")), keep_records=True)
    deltas = run(subject, [*ids_of("a"), stop_token], end("stop", stop_token))
    assert text(deltas) == expected
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", reason)
    # It was generated and is counted, whether its text is shown or not.
    assert subject.num_tokens == 2
    assert [record.token_id for delta in deltas for record in delta.tokens] == [*ids_of("a"), stop_token]


def test_the_same_id_earlier_is_text() -> None:
    """Before `min_tokens` a stop id may be generated without ending anything."""
    (b,) = ids_of("b")
    assert text(run(choice(), [b, b], end("stop", b), sizes=[2])) == "b"


def test_no_tokens() -> None:
    (delta,) = run(choice(echo="prompt"), [], end())
    assert (delta.text, delta.finish_reason, delta.is_first) == ("prompt", "length", True)


def test_an_echo_comes_first_and_is_not_searched() -> None:
    subject = choice(echo="stop here", stop=("stop",), keep_records=True)
    deltas = run(subject, byte_ids(b" go"), end())
    assert text(deltas) == "stop here go"
    assert deltas[0].tokens[0].offset == len("stop here")


def test_nothing_is_told_while_there_is_no_text() -> None:
    subject = choice(stop=("abc",))
    assert subject.feed(byte_ids(b"ab"), [], None) is None
    delta = subject.feed(byte_ids(b"x"), [], None)
    assert delta is not None
    assert (delta.text, delta.num_new_tokens) == ("abx", 3)


@pytest.mark.parametrize(
    ("reason", "message", "status", "told"),
    [
        ("error", "NaN in the logits", 503, "NaN in the logits"),
        ("error", "", 503, "engine"),
        ("abort", "", 503, "aborted"),
    ],
)
def test_a_choice_that_was_given_up(reason: str, message: str, status: int, told: str) -> None:
    with pytest.raises(APIError, match=told) as caught:
        choice().feed([], [], end(reason, message=message))
    assert caught.value.status == status
