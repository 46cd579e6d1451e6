"""Requests whose spans name stored embeddings: the same rows, the same tokens, and a lease that always ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path

import msgspec
import numpy as np
import pytest
from torch import Tensor

from runner.embedding_store import EmbeddingStore, StoredRows
from runner.messages import DIGEST_BYTES, Generate, Span
from runner.sequence import InvalidRequest, Request
from tests.models import HIDDEN_SIZE, VOCAB_SIZE, Family
from tests.parity.harness import Harness, Piece
from tests.parity.reference import sample
from tests.runner.test_sequence import E, make

ROW = HIDDEN_SIZE * 4
BLOCK = 4


@pytest.fixture(scope="module")
def path(tiny_model: Callable[[Family], Path]) -> Path:
    return tiny_model("llama")


class Stored:
    """A harness whose requests may lease their rows from a store."""

    def __init__(self, path: Path, *, num_blocks: int | None = None, overlap: bool = False) -> None:
        self.harness = Harness(path, block_size=BLOCK, num_blocks=num_blocks, async_scheduling=overlap)
        self.store = EmbeddingStore(1 << 24, 1 << 24, 3600.0)
        self.given_back = 0

    def add(self, pieces: Sequence[Piece], stored: set[int], max_tokens: int = 32, n: int = 1) -> int:
        """`stored`: which of the pieces that are rows."""
        message, frames = self.harness.message(tuple(pieces), max_tokens, n=n)
        token_ids, digests, *rows = frames
        numbers = [number for number, piece in enumerate(pieces) if isinstance(piece, Tensor)]
        own, spans, used = b"", [], 0
        for place, (number, span) in enumerate(zip(numbers, message.spans, strict=True)):
            mine, used = bytes(digests[used : used + span.length * DIGEST_BYTES]), used + span.length * DIGEST_BYTES
            if number in stored:
                data = np.frombuffer(rows[place], np.uint8).reshape(-1, ROW)
                info = self.store.put(0, sha256(rows[place]).hexdigest(), data, mine)
                spans.append(Span(span.start, span.length, stored=info.id))
                rows[place] = memoryview(b"")
            else:
                spans.append(span)
                own += mine
        message = msgspec.structs.replace(message, spans=tuple(spans))
        self._queue(message, [token_ids, memoryview(own), *rows])
        return message.request

    def _queue(self, message: Generate, frames: list[memoryview]) -> None:
        leased = self.store.lease(span.stored for span in message.spans if span.stored)
        request = Request.from_message(
            message,
            frames,
            vocab_size=VOCAB_SIZE,
            row_size=ROW,
            max_model_len=128,
            block_size=BLOCK,
            private_cache=False,
            stored=leased,
        )
        request.on_release = partial(self._give_back, leased)
        self.harness.engine.add(request)

    def _give_back(self, leased: tuple[StoredRows, ...]) -> None:
        self.given_back += 1
        self.store.give_back(leased)

    @property
    def in_use(self) -> int:
        return sum(entry.users for entry in self.store._entries.values())


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
def test_the_same_tokens_as_in_one_piece(path: Path, overlap: bool) -> None:
    """All in one batch, in a cache so small that they are preempted and computed again from the store's memory."""
    kept = Stored(path, num_blocks=33, overlap=overlap)
    numbers = []
    for cut in range(1, 7):
        rows, ids = sample(path, 24).rows, sample(path, 24).ids
        pieces: list[Piece] = [rows[:cut], ids[cut : cut + 3], rows[cut + 3 : 15], rows[15:]]
        numbers.append(kept.add(pieces, {0, 3} if cut % 2 else {2}))
    assert kept.in_use == 9
    kept.harness.run()
    assert kept.harness.engine.stats().preemptions > 0
    assert all(kept.harness.tokens(number) == sample(path, 24).tokens for number in numbers)
    assert (kept.in_use, kept.given_back) == (0, 6)


def test_they_share_blocks_with_rows_of_any_origin(path: Path) -> None:
    kept, whole = Stored(path), sample(path, 24)
    first = kept.harness.add(whole.rows, 1)
    kept.harness.run()
    second = kept.add([whole.rows[:7], whole.rows[7:]], {0}, 1)
    third = kept.add([whole.rows], {0}, 1)
    kept.harness.run()
    assert [kept.harness.answer(number).cached_tokens for number in (first, second, third)] == [0, 20, 20]


def test_they_are_given_back_once_whatever_the_end(path: Path) -> None:
    kept, rows = Stored(path), sample(path, 24).rows
    engine = kept.harness.engine
    kept.add([rows], {0}, 2, n=3)  # ends by itself, choice by choice
    aborted = kept.add([rows], {0}, n=2)
    waiting = kept.add([rows], {0})
    engine.abort((0, waiting))
    assert (kept.given_back, kept.in_use) == (1, 2)
    for _ in range(3):
        engine.step()
    engine.abort((0, aborted), 1)
    engine.abort((0, aborted), 0)
    engine.abort((0, aborted))
    gone = kept.add([rows], {0})
    engine.step()
    engine.abort_worker(0)
    kept.harness.run()
    assert (kept.given_back, kept.in_use) == (4, 0)
    engine.abort((0, gone))
    assert kept.given_back == 4


def test_a_refused_one_is_given_back(path: Path) -> None:
    kept = Stored(path)
    request = make([5])
    request.on_release = partial(kept._give_back, ())
    kept.harness.engine.refuse(request)
    assert kept.given_back == 1


# --- what is made of the message --------------------------------------------------------------------------------------


def entry(count: int, value: int) -> StoredRows:
    rows = np.full((count, 8), value, np.uint8)
    return StoredRows("emb", 0, "", rows, bytes([value]) * (DIGEST_BYTES * count), 0.0, 1.0, 1.0)


def stored(ids: list[int], spans: list[Span], frames: list[bytes], leased: tuple[StoredRows, ...]) -> Request:
    message = replace_spans(make([5]), spans)
    return Request.from_message(
        message,
        [memoryview(part) for part in (np.array(ids, np.int32).tobytes(), *frames)],
        vocab_size=100,
        row_size=8,
        max_model_len=32,
        block_size=4,
        private_cache=False,
        stored=leased,
    )


def replace_spans(like: Request, spans: list[Span]) -> Generate:
    return Generate(*like.key, 1, like.sampling, tuple(spans))


SPANS = [Span(0, 2, stored="emb"), Span(2, 1), Span(4, 1, stored="emb")]
IDS = [E, E, E, 7, E]


def test_rows_and_digests_are_in_the_prompts_order() -> None:
    own = bytes(range(DIGEST_BYTES))
    request = stored(IDS, SPANS, [own, b"", b"12345678", b""], (entry(2, 1), entry(1, 2)))
    assert request.row_digests == bytes([1]) * 32 + own + bytes([2]) * 16
    assert [rows.tobytes() for rows in request.rows] == [bytes([1]) * 16, b"12345678", bytes([2]) * 8]
    assert request.row_bytes == 8  # the store counts its own


@pytest.mark.parametrize(
    ("frames", "leased"),
    [
        ([bytes(16), b"", b"12345678", b""], (entry(2, 1),)),  # one is missing
        ([bytes(16), b"", b"12345678", b""], (entry(1, 1), entry(1, 2))),  # another length
        ([bytes(16), b"", b"12345678", b""], (entry(3, 1), entry(1, 2))),
        ([bytes(16), bytes(16), b"12345678", b""], (entry(2, 1), entry(1, 2))),  # rows all the same
        ([bytes(32), b"", b"12345678", b""], (entry(2, 1), entry(1, 2))),  # a digest too many
        ([b"", b"", b"12345678", b""], (entry(2, 1), entry(1, 2))),
        ([bytes(64), b"", b"12345678", b""], (entry(2, 1), entry(1, 2))),  # theirs as well
    ],
)
def test_messages_that_do_not_fit(frames: list[bytes], leased: tuple[StoredRows, ...]) -> None:
    with pytest.raises(InvalidRequest):
        stored(IDS, SPANS, frames, leased)
