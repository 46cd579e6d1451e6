"""The prefix cache's key: everything that decides over a block's keys and values is in it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from runner.block_hash import BlockHashes
from runner.messages import DIGEST_BYTES, EMBEDDING_ID

SIZE = 4

Row = int | str
"""A token id, or the name of an embedding's content."""


def frames(rows: Sequence[Row]) -> tuple[NDArray[np.int32], bytes]:
    """The rows' token ids and digests, as in a request's message."""
    ids = np.array([row if isinstance(row, int) else EMBEDDING_ID for row in rows], np.int32)
    contents = (row.encode() for row in rows if isinstance(row, str))
    return ids, b"".join(hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest() for content in contents)


def links(rows: Sequence[Row], salt: bytes = b"") -> list[bytes]:
    return BlockHashes(salt, SIZE).extend(*frames(rows))


@pytest.mark.parametrize(("rows", "blocks"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (9, 2)])
def test_a_link_for_every_whole_block(rows: int, blocks: int) -> None:
    assert len(links(list(range(rows)))) == blocks
    assert all(len(link) == DIGEST_BYTES for link in links(list(range(rows))))


def test_equal_prefixes_have_equal_links() -> None:
    a = links([1, 2, 3, "a", 5, 6, 7, 8, 9])
    b = links([1, 2, 3, "a", 5, 6, 7, 0, 9])
    assert a[0] == b[0]
    assert a[1] != b[1]


@pytest.mark.parametrize(
    "other",
    [
        [2, 2, 3, 4],
        [1, 2, 3, 5],
        [4, 3, 2, 1],
        ["a", 2, 3, 4],
        [1, 2, 3, "a"],
    ],
)
def test_ids_and_kinds_of_row_count(other: list[Row]) -> None:
    assert links(other) != links([1, 2, 3, 4])


@pytest.mark.parametrize(
    ("rows", "other"),
    [
        (["a", 2, 3, 4], ["b", 2, 3, 4]),
        (["a", "b", 3, 4], ["b", "a", 3, 4]),
        # The same token ids and the same digests; only the places differ.
        (["a", 0, 3, 4], [0, "a", 3, 4]),
        (["a", 0, "b", 4], ["a", "b", 0, 4]),
    ],
)
def test_content_and_place_of_embeddings_count(rows: list[Row], other: list[Row]) -> None:
    assert links(rows) != links(other)


def test_digests_belong_to_their_own_block() -> None:
    """The second block's embeddings are not the first's."""
    first: list[Row] = ["a", 2, 3, 4]
    a, b = links([*first, "b", 6, 7, 8]), links([*first, "c", 6, 7, 8])
    assert a[0] == b[0]
    assert a[1] != b[1]


def test_what_stands_before_counts() -> None:
    assert links([1, 2, 3, 4, 5, 6, 7, 8])[1] != links([0, 2, 3, 4, 5, 6, 7, 8])[1]
    assert links([1, 2, 3, 4, 1, 2, 3, 4])[0] != links([1, 2, 3, 4, 1, 2, 3, 4])[1]


@pytest.mark.parametrize("salt", [b"a", b"\0", b"\0a", b"x" * 1000])
def test_salts_count(salt: bytes) -> None:
    """From the first block on, long ones whole."""
    rows = list(range(8))
    for other in (b"", salt + b"\0", salt[:-1] + b"y"):
        assert not set(links(rows, salt)) & set(links(rows, other))


def test_it_cant_be_computed_from_outside() -> None:
    """A client that could choose prompts with equal links would read another's cache: the hash is keyed at start."""
    ids = np.arange(4, dtype=np.int32)
    root = hashlib.blake2b(b"", digest_size=DIGEST_BYTES).digest()
    guess = hashlib.blake2b(root + ids.tobytes(), digest_size=DIGEST_BYTES).digest()
    assert links([0, 1, 2, 3]) != [guess]


def test_a_fork_goes_on_by_itself() -> None:
    prompt = np.array([1, EMBEDDING_ID, 3, 4, EMBEDDING_ID, 6], np.int32)
    digests = bytes(range(2 * DIGEST_BYTES))
    parent = BlockHashes(b"", SIZE)
    parent.extend(prompt, digests)
    forks = [parent.fork() for _ in range(2)]
    answers = [np.array([*prompt, 7, token], np.int32) for token in (8, 9)]
    extended = [list(fork.extend(ids, digests)) for fork, ids in zip(forks, answers, strict=True)]
    whole = [BlockHashes(b"", SIZE).extend(ids, digests) for ids in answers]
    assert extended == whole
    assert extended[0][1] != extended[1][1]
    assert len(parent.links) == 1


kinds_of_row = st.integers(0, 3) | st.sampled_from(["a", "b"])
row_lists = st.lists(kinds_of_row, max_size=14)


@pytest.mark.fuzz
@given(row_lists, st.lists(st.integers(1, 14), max_size=4))
def test_the_way_it_is_extended_makes_no_difference(rows: list[Row], stops: list[int]) -> None:
    """Known rows grow by chunks and by single tokens."""
    ids, digests = frames(rows)
    hashes = BlockHashes(b"", SIZE)
    for stop in sorted(stops):
        hashes.extend(ids[:stop], digests)
    assert hashes.extend(ids, digests) == links(rows)


@pytest.mark.fuzz
@given(row_lists, st.dictionaries(st.integers(0, 13), kinds_of_row, max_size=2))
def test_links_are_equal_exactly_where_the_rows_are(rows: list[Row], changes: dict[int, Row]) -> None:
    other = [changes.get(i, row) for i, row in enumerate(rows)]
    for i, (a, b) in enumerate(zip(links(rows), links(other), strict=True)):
        end = (i + 1) * SIZE
        assert (a == b) == (rows[:end] == other[:end])
