"""What is kept, for whom, how long, and what makes room."""

from __future__ import annotations

import random
import threading
from collections import Counter
from hashlib import sha256

import numpy as np
import pytest
from numpy.typing import NDArray

from runner import embedding_store
from runner.embedding_store import ENTRY_BYTES, EmbeddingStore, NotStored, StoredRows, StoreFull, TooLarge
from runner.messages import DIGEST_BYTES

ROW = 64
ROOM = 10 * (10 * (ROW + DIGEST_BYTES) + ENTRY_BYTES)
"""For ten entries of ten rows."""


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> EmbeddingStore:
    return EmbeddingStore(ROOM, ROOM, 60.0, clock, clock)


def rows(seed: int, count: int = 10) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, ROW), np.uint8)


def put(store: EmbeddingStore, seed: int, owner: int = 0, count: int = 10) -> str:
    data = rows(seed, count)
    return store.put(owner, sha256(data.tobytes()).hexdigest(), data, bytes(DIGEST_BYTES * count)).id


def ids(store: EmbeddingStore, owner: int = 0, **options: bool) -> list[str]:
    return [info.id for info in store.list(owner, "", 100, **options)[0]]


def test_the_same_rows_are_one_entry_with_its_time_anew(store: EmbeddingStore, clock: Clock) -> None:
    first = put(store, 1)
    clock.now += 50
    assert put(store, 1) == first
    assert len(store) == 1
    assert store.size == ROOM // 10
    (info,) = store.find(0, [first])
    assert (info.rows, info.created_at, info.expires_at) == (10, 1000, 1110)
    assert info.sha256 == sha256(rows(1).tobytes()).hexdigest()


def test_an_owner_finds_and_loses_only_its_own(store: EmbeddingStore) -> None:
    mine, theirs = put(store, 1, owner=0), put(store, 1, owner=1)
    assert mine != theirs  # the same rows: an id tells nothing of what another owner has
    assert store.find(1, [mine]) == store.find(2, [mine, theirs]) == []
    with pytest.raises(NotStored):
        store.delete(1, mine)
    assert (ids(store, 0), ids(store, 1), ids(store, 2)) == ([mine], [theirs], [])
    store.delete(0, mine)
    assert (ids(store, 0), ids(store, 1)) == ([], [theirs])


def test_it_expires_however_often_it_is_used(store: EmbeddingStore, clock: Clock) -> None:
    first = put(store, 1)
    clock.now += 59
    second = put(store, 2)
    assert len(store.find(0, [first])) == 1
    store.give_back(store.lease([first]))
    clock.now += 1
    assert ids(store) == [second]
    assert store.find(0, [first]) == []
    with pytest.raises(NotStored):
        store.lease([first])
    clock.now += 60
    store.expire()
    assert (len(store), store.size) == (0, 0)


@pytest.mark.parametrize("jump", [-1e6, 1e6])
def test_a_wall_clock_that_jumps_drops_and_keeps_nothing(clock: Clock, jump: float) -> None:
    wall = Clock()
    store = EmbeddingStore(ROOM, ROOM, 60.0, clock, wall)
    first = put(store, 1)
    clock.now += 30
    wall.now += jump
    second = put(store, 2)
    clock.now += 29
    assert ids(store) == [second, first]
    clock.now += 1
    assert ids(store) == [second]
    clock.now += 30
    assert ids(store) == []


def test_what_was_used_longest_ago_makes_room(store: EmbeddingStore) -> None:
    names = [put(store, seed) for seed in range(10)]
    store.find(0, [names[0]])
    store.give_back(store.lease([names[1]]))
    put(store, 2)  # again
    put(store, 10)
    put(store, 11)
    assert set(names) - set(ids(store)) == {names[3], names[4]}
    assert store.size == ROOM


def test_what_is_in_use_stays_and_counts(store: EmbeddingStore, clock: Clock) -> None:
    names = [put(store, seed) for seed in range(10)]
    held = store.lease(names)
    with pytest.raises(StoreFull):
        put(store, 10)
    store.delete(0, names[0])
    clock.now += 60
    assert ids(store) == []  # all gone for whoever asks
    assert store.size == ROOM
    with pytest.raises(StoreFull):
        put(store, 10)
    assert np.array_equal(held[3].rows, rows(3))
    store.give_back(held[:1])
    name = put(store, 10)
    assert ids(store) == [name]
    store.give_back(held[1:])
    assert store.size == ROOM // 10


def test_a_second_user_keeps_what_the_first_gives_back(store: EmbeddingStore) -> None:
    name = put(store, 0)
    first, second = store.lease([name]), store.lease([name, name])
    store.give_back(first)
    store.give_back(second[:1])
    for seed in range(1, 12):
        put(store, seed)
    assert name in ids(store)
    store.give_back(second[1:])
    for seed in range(12, 22):
        put(store, seed)
    assert name not in ids(store)


def test_deleted_while_in_use_and_put_again(store: EmbeddingStore) -> None:
    """Two entries of one id: giving the old one back leaves the new one alone."""
    name = put(store, 0)
    old = store.lease([name])
    store.delete(0, name)
    assert put(store, 0) == name
    new = store.lease([name])
    assert new[0] is not old[0]
    store.give_back(old)
    assert (len(store), store.size) == (1, ROOM // 10)
    store.give_back(new)
    store.delete(0, name)
    assert store.size == 0


def test_a_lease_is_of_all_or_of_nothing(store: EmbeddingStore) -> None:
    name = put(store, 0)
    with pytest.raises(NotStored):
        store.lease([name, "emb_nothing"])
    for seed in range(1, 11):
        put(store, seed)
    assert name not in ids(store)


def test_an_owner_over_its_quota_makes_room_by_itself(clock: Clock) -> None:
    store = EmbeddingStore(ROOM, ROOM // 2, 60.0, clock)
    others = [put(store, seed, owner=1) for seed in range(5)]
    mine = [put(store, seed, owner=0) for seed in range(7)]
    assert ids(store, 0, newest_first=False) == mine[2:]
    assert ids(store, 1, newest_first=False) == others
    store.lease(mine[2:])
    with pytest.raises(StoreFull):
        put(store, 7, owner=0)
    assert ids(store, 1, newest_first=False) == others
    with pytest.raises(TooLarge):
        put(store, 8, owner=0, count=200)


def test_what_another_owner_uses_makes_no_room(clock: Clock) -> None:
    store = EmbeddingStore(ROOM, ROOM, 60.0, clock)
    used, spare = [put(store, seed, owner=1) for seed in range(2)], [put(store, seed, owner=1) for seed in range(2, 4)]
    held = store.lease(used)
    for seed in range(8):
        put(store, seed, owner=0)
    assert ids(store, 1, newest_first=False) == used
    assert not store.find(1, spare)
    assert len(ids(store, 0)) == 8
    store.give_back(held)
    assert store.size == ROOM


def test_an_owner_has_so_many_entries_at_most(monkeypatch: pytest.MonkeyPatch, store: EmbeddingStore) -> None:
    monkeypatch.setattr(embedding_store, "MAX_ENTRIES", 3)
    names = [put(store, seed) for seed in range(5)]
    assert ids(store, newest_first=False) == names[2:]


def test_pages(store: EmbeddingStore) -> None:
    names = [put(store, seed) for seed in range(10)]
    for newest_first, order in ((False, names), (True, names[::-1])):
        found: list[str] = []
        more = True
        while more:
            page, more = store.list(0, found[-1] if found else "", 4, newest_first=newest_first)
            found += [info.id for info in page]
        assert found == order
    with pytest.raises(NotStored):
        store.list(0, "emb_nothing", 4)
    with pytest.raises(NotStored):
        store.list(1, names[0], 4)


def test_it_keeps_its_books_whatever_happens(clock: Clock) -> None:
    """Against a plain count, from two threads: a random life, and nothing is left of it."""
    store = EmbeddingStore(ROOM, ROOM * 6 // 10, 60.0, clock)
    seen: Counter[str] = Counter()

    def live(seed: int) -> None:
        rng = random.Random(seed)
        held: list[tuple[StoredRows, ...]] = []
        for _ in range(600):
            owner, number = rng.randrange(3), rng.randrange(14)
            try:
                match rng.randrange(6):
                    case 0 | 1:
                        put(store, number, owner)
                        seen["put"] += 1
                    case 2 if names := ids(store, owner):
                        held.append(store.lease(rng.sample(names, min(2, len(names)))))
                        seen["lease"] += 1
                    case 3 if held:
                        store.give_back(held.pop(rng.randrange(len(held))))
                    case 4 if names := ids(store, owner):
                        store.delete(owner, rng.choice(names))
                        seen["delete"] += 1
                    case 5:
                        clock.now += rng.random()
            except (NotStored, StoreFull) as error:
                seen[type(error).__name__] += 1
            assert 0 <= store.size <= ROOM
        for each in held:
            store.give_back(each)

    threads = [threading.Thread(target=live, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {"put", "lease", "delete"} <= set(seen)
    assert store.size == len(store) * ROOM // 10
    clock.now += 60
    store.expire()
    assert (len(store), store.size) == (0, 0)
