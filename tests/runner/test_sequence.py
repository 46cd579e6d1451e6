"""What a `Generate` message must be like to become a request, and what is made of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.hints import counted_ids
from runner.messages import DIGEST_BYTES, EMBEDDING_ID, Generate, SamplingParams, Span
from runner.sequence import InvalidRequest, Request, Sequence

VOCAB, ROW_SIZE, MAX_LEN = 100, 8, 32
E = EMBEDDING_ID


def make(
    ids: list[int],
    spans: list[tuple[int, int]] | None = None,
    *,
    n: int = 1,
    number: int = 0,
    salt: str = "",
    private: bool = False,
    frames: list[bytes] | None = None,
    hints: bytes | None = None,
    **sampling: Any,
) -> Request:
    """The request of a message about `ids` whose embedding rows are `spans`' (start, length)."""
    spans = spans or []
    rows = [bytes([i]) * (length * ROW_SIZE) for i, (_, length) in enumerate(spans, 1)]
    embedded = sum(length for _, length in spans)
    digests = bytes(i % 256 for i in range(embedded * DIGEST_BYTES))
    parts = [np.array(ids, np.int32).tobytes(), digests, *rows] if frames is None else frames
    if hints is not None:
        parts.insert(2, hints)
    message = Generate(
        3,
        number,
        n,
        SamplingParams(**{"max_tokens": 4, **sampling}),
        tuple(Span(*s) for s in spans),
        salt,
        has_hints=hints is not None,
    )
    return Request.from_message(
        message,
        [memoryview(part) for part in parts],
        vocab_size=VOCAB,
        row_size=ROW_SIZE,
        max_model_len=MAX_LEN,
        block_size=4,
        private_cache=private,
    )


def test_a_prompt_of_both_kinds() -> None:
    request = make([5, E, E, 6, E, 0, VOCAB - 1], [(1, 2), (4, 1)], n=2, number=7)
    assert request.key == (3, 7)
    assert (request.n, request.prompt_len, request.row_bytes) == (2, 7, 3 * ROW_SIZE)
    assert request.token_ids.tolist() == [5, E, E, 6, E, 0, VOCAB - 1]
    assert [rows.shape for rows in request.rows] == [(2, ROW_SIZE), (1, ROW_SIZE)]


def test_spans_may_touch() -> None:
    request = make([E, E, E], [(0, 1), (1, 2)])
    assert request.row_bytes == 3 * ROW_SIZE


def test_hints_are_for_the_slots_alone() -> None:
    """The request's own ids, of which the cache's keys are made, are as without hints."""
    request = make([5, E, E, 6, E], [(1, 2), (4, 1)], hints=np.array([0, E, VOCAB - 1], np.int32).tobytes())
    assert request.token_ids.tolist() == [5, E, E, 6, E]
    assert request.slot_ids is not None
    assert ((request.slot_ids < 0) == (request.token_ids < 0)).all()
    assert counted_ids(torch.from_numpy(request.slot_ids)).tolist() == [5, 0, E, 6, VOCAB - 1]
    assert request.row_bytes == 3 * ROW_SIZE
    assert make([5, E], [(1, 1)]).slot_ids is None


@pytest.mark.parametrize(
    ("hints", "match"),
    [
        ([1], "must match"),
        ([1, 2, 3], "must match"),
        ([], "must match"),
        ([1, VOCAB], "below 100"),
        ([-2, 1], "below 100"),
        ([2**31 - 1, 1], "below 100"),
    ],
)
def test_refused_for_its_hints(hints: list[int], match: str) -> None:
    with pytest.raises(InvalidRequest, match=match):
        make([5, E, E], [(1, 2)], hints=np.array(hints, np.int32).tobytes())


def test_frames_are_viewed_and_not_copied() -> None:
    row = bytearray(ROW_SIZE)
    request = make([E], [(0, 1)], frames=[np.array([E], np.int32).tobytes(), bytes(DIGEST_BYTES), row])  # type: ignore[list-item]
    row[0] = 9
    assert request.rows[0][0, 0] == 9


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_tokens": MAX_LEN - 2},
        {"max_tokens": 0, "prompt_logprobs": 0},
        {"logit_bias": ((0, 1.0), (VOCAB - 1, -1.0)), "stop_token_ids": (0, VOCAB - 1)},
    ],
)
def test_limits_are_included(sampling: dict[str, Any]) -> None:
    assert make([1, 2], **sampling).prompt_len == 2


@pytest.mark.parametrize(
    ("sampling", "match"),
    [
        ({"max_tokens": MAX_LEN - 1}, "fit in 32 rows"),
        ({"max_tokens": 0}, "at least 1"),
        ({"max_tokens": -1}, "at least 1"),
        ({"max_tokens": -1, "prompt_logprobs": 1}, "at least 1"),
        ({"n": 0}, "at least 1"),
        ({"n": -2}, "at least 1"),
        ({"logit_bias": ((VOCAB, 1.0),)}, "below 100"),
        ({"logit_bias": ((-1, 1.0),)}, "below 100"),
        ({"stop_token_ids": (VOCAB,)}, "below 100"),
        ({"stop_token_ids": (5, -1)}, "below 100"),
        ({"stop_token_ids": (2**40,)}, "below 100"),
    ],
)
def test_refused_for_its_parameters(sampling: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidRequest, match=match):
        make([1, 2], **sampling)


@pytest.mark.parametrize("ids", [[VOCAB], [1, VOCAB + 5], [-2], [1, -(2**31)], [2**31 - 1]])
def test_refused_for_its_ids(ids: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="below 100"):
        make(ids)


@pytest.mark.parametrize("length", [0, MAX_LEN + 1])
def test_refused_for_its_length(length: int) -> None:
    with pytest.raises(InvalidRequest, match="fit in 32 rows"):
        make([1] * length)


@pytest.mark.parametrize(
    ("ids", "spans"),
    [
        ([1, E], []),  # nobody brings the row
        ([1, 2], [(0, 1)]),  # a token's place
        ([E, 2], [(0, 2)]),
        ([E, E], [(0, 1)]),  # one too few
        ([E, E], [(0, 2), (1, 1)]),  # twice
        ([E, E], [(1, 1), (0, 1)]),  # out of order
        ([E, E], [(0, 0), (0, 2)]),  # nothing
        ([E, E], [(0, 2), (2, 0)]),
        ([E, E], [(-2, 2)]),
        ([E, E], [(0, -1), (0, 2)]),
        ([E, E], [(5, 2)]),  # past the end,
        ([1, E], [(1, 5)]),
        # and just as many rows past the end as are missing elsewhere: nothing adds up wrong.
        ([E, E, E, 1, E, E], [(4, 5)]),
        ([E, E], [(2, 2)]),
    ],
)
def test_refused_for_its_spans(ids: list[int], spans: list[tuple[int, int]]) -> None:
    with pytest.raises(InvalidRequest, match="embedding rows"):
        make(ids, spans)


IDS, DIGEST, ROW = np.array([1, E], np.int32).tobytes(), bytes(DIGEST_BYTES), bytes(ROW_SIZE)


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [IDS],
        [IDS, DIGEST],
        [IDS, DIGEST, ROW, ROW],
        [IDS[:-1], DIGEST, ROW],
        [b"", DIGEST, ROW],
        [IDS, b"", ROW],
        [IDS, DIGEST + b"\0", ROW],
        [IDS, DIGEST, b""],
        [IDS, DIGEST, ROW[:-1]],
        [IDS, DIGEST, ROW + ROW],
    ],
)
def test_refused_for_its_frames(frames: list[bytes]) -> None:
    with pytest.raises(InvalidRequest):
        make([], [(1, 1)], frames=frames)


def runs_of(ids: list[int]) -> list[tuple[int, int]]:
    """The spans that a worker would send."""
    runs: list[tuple[int, int]] = []
    for place, token in enumerate(ids):
        if token == E and runs and sum(runs[-1]) == place:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        elif token == E:
            runs.append((place, 1))
    return runs


wrong_spans = st.tuples(st.integers(-1, 7), st.integers(-1, 7))


@pytest.mark.fuzz
@given(st.lists(st.sampled_from([1, E]), min_size=1, max_size=6), st.dictionaries(st.integers(0, 3), wrong_spans))
def test_accepted_only_if_every_embedding_row_has_its_bytes(ids: list[int], wrong: dict[int, tuple[int, int]]) -> None:
    spans = [wrong.get(i, span) for i, span in enumerate(runs_of(ids))]
    covered = [place for start, length in spans for place in range(start, start + length)]
    right = (
        all(length > 0 for _, length in spans)
        and covered == sorted(set(covered))
        and covered == [place for place, token in enumerate(ids) if token == E]
    )
    try:
        request = make(ids, spans)
    except InvalidRequest:
        assert not right
    else:
        assert right
        for place in range(len(ids)):
            ((first, rows),) = request.embedding_rows(place, place + 1) or [(place, np.zeros((0, ROW_SIZE), np.uint8))]
            assert first == place
            assert len(rows) == (ids[place] == E)


# --- what is made of it ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, 7, [(1, [1, 1]), (4, [2])]),
        (0, 1, []),
        (0, 2, [(1, [1])]),
        (2, 4, [(2, [1])]),
        (2, 5, [(2, [1]), (4, [2])]),
        (5, 7, []),
        (3, 3, []),
    ],
)
def test_embedding_rows_of_a_chunk(start: int, end: int, expected: list[tuple[int, list[int]]]) -> None:
    request = make([5, E, E, 6, E, 0, 1], [(1, 2), (4, 1)])
    runs = request.embedding_rows(start, end)
    assert [(first, rows[:, 0].tolist()) for first, rows in runs] == expected


def test_a_chunk_within_a_span_has_that_spans_middle() -> None:
    rows = np.arange(5 * ROW_SIZE, dtype=np.uint8).reshape(5, ROW_SIZE)
    ids = np.array([1, *[E] * 5], np.int32)
    request = make([], [(1, 5)], frames=[ids.tobytes(), bytes(5 * DIGEST_BYTES), rows.tobytes()])
    ((first, run),) = request.embedding_rows(2, 5)
    assert first == 2
    assert np.array_equal(run, rows[1:4])


def test_siblings_wait_for_the_first() -> None:
    request = make(list(range(10)), n=3, max_tokens=5)
    first, *others = Sequence.of_request(request)
    assert first.waits_for is None
    assert [(s.choice, s.waits_for) for s in others] == [(1, first), (2, first)]
    assert first.limit == 15
    assert len({id(s.hashes) for s in (first, *others)}) == 3
    assert first.hashes.links == others[0].hashes.links
    assert len(first.hashes.links) == 2


def test_one_choice_scores_the_prompt_for_all() -> None:
    scoring = Sequence.of_request(make([1, 2], n=3, prompt_logprobs=0))
    assert [s.scores_prompt for s in scoring] == [True, False, False]
    assert not any(s.scores_prompt for s in Sequence.of_request(make([1, 2], n=3)))


def test_private_caches_are_keyed_by_the_request() -> None:
    def link(**settings: Any) -> bytes:
        request = make([1, 2, 3, 4], **settings)
        return Sequence.of_request(request)[0].hashes.extend(request.token_ids, request.row_digests)[0]

    assert link() == link(number=1)
    assert link(salt="a") != link()
    private = [link(private=True, number=number, salt=salt) for number in (0, 1) for salt in ("", "a", "\0003,0")]
    assert len({*private, link(), link(salt="a")}) == 8
    # Within the request, siblings share.
    siblings = Sequence.of_request(make([1, 2, 3, 4], n=2, private=True))
    assert siblings[0].hashes.links == siblings[1].hashes.links
