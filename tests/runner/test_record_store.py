"""What is kept of records: by whom it can be found, how much there is of it, and for how long."""

from __future__ import annotations

import pytest

from runner.messages import DeleteRecord, GetRecord, GetTurns, PutRecord, Reply
from runner.record_messages import answer
from runner.record_store import NotKept, Record, RecordStore, TooLarge


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def record(size: int = 0, previous: str = "") -> Record:
    return Record(b"b" * size, b"[]", previous)


SIZE = record(100).size


def has(store: RecordStore, owner: int, name: str) -> bool:
    try:
        return bool(store.get(owner, name))
    except NotKept:
        return False


def test_a_record_is_its_owners() -> None:
    store = RecordStore()
    store.put(0, "a", record(1))
    store.put(1, "b", record())
    assert store.get(0, "a") == record(1)
    assert not any((has(store, 1, "a"), has(store, 2, "a"), has(store, 0, "b")))
    for owner in (1, 2):
        with pytest.raises(NotKept):
            store.delete(owner, "a")
    store.delete(0, "a")
    with pytest.raises(NotKept):
        store.delete(0, "a")
    assert not has(store, 0, "a")
    assert len(store) == 1


def test_a_record_is_put_in_the_place_of_the_one_before() -> None:
    store = RecordStore()
    for size in (100, 5, 50):
        store.put(0, "a", record(size))
    assert store.get(0, "a") == record(50)
    assert (len(store), store.size) == (1, record(50).size)


def test_a_conversation_is_its_owners_from_beginning_to_end() -> None:
    store = RecordStore()
    for name, previous in (("a", ""), ("b", "a"), ("c", "b"), ("other", "a")):
        store.put(0, name, Record(b"", name.encode(), previous))
    assert store.turns(0, "c", 3) == [b"a", b"b", b"c"]
    with pytest.raises(TooLarge):
        store.turns(0, "c", 2)
    store.put(1, "theirs", record(previous="a"))
    for owner, name in ((1, "c"), (1, "theirs"), (0, "none")):
        with pytest.raises(NotKept):
            store.turns(owner, name, 100)
    store.delete(0, "b")
    with pytest.raises(NotKept):
        store.turns(0, "c", 100)
    assert store.turns(0, "other", 100) == [b"a", b"other"]


def test_a_conversation_that_goes_in_circles_ends() -> None:
    store = RecordStore()
    for name, previous in (("a", "b"), ("b", "a")):
        store.put(0, name, Record(b"", b"", previous))
    with pytest.raises(TooLarge):
        store.turns(0, "a", 100)


def test_no_more_than_so_many() -> None:
    store = RecordStore(max_records=3)
    for name in "abc":
        store.put(0, name, record())
    store.get(0, "a")
    store.put(0, "d", record())
    assert [has(store, 0, name) for name in "abcd"] == [True, False, True, True]


def test_no_more_than_so_many_bytes() -> None:
    store = RecordStore(max_bytes=3 * SIZE)
    for number in range(10):
        store.put(0, str(number), record(100))
        assert store.size <= 3 * SIZE
    assert [number for number in range(10) if has(store, 0, str(number))] == [7, 8, 9]
    for number in (7, 8, 9):
        store.delete(0, str(number))
    assert (store.size, len(store)) == (0, 0)


def test_who_takes_most_loses() -> None:
    for store in (RecordStore(max_records=4), RecordStore(max_bytes=4 * SIZE)):
        store.put(0, "quiet", record(100))
        for number in range(100):
            store.put(1, str(number), record(100))
        assert has(store, 0, "quiet")
        assert len(store) == 4


def test_those_that_are_still_made_stay_while_there_are_others() -> None:
    store = RecordStore(max_records=3)
    made = Record(b"", b"[]", will=b"will", worker=0)
    for name, each in (("old", made), ("a", record()), ("new", made), ("b", record())):
        store.put(0, name, each)
    assert [has(store, 0, name) for name in ("old", "a", "new", "b")] == [True, False, True, True]
    for name in "cd":
        store.put(0, name, made)
    assert [has(store, 0, name) for name in ("old", "new", "b", "c", "d")] == [False, True, False, True, True]


def test_one_that_is_too_large_is_not_kept() -> None:
    store = RecordStore(max_record_bytes=102)
    store.put(0, "a", record(100))
    with pytest.raises(TooLarge):
        store.put(0, "b", record(101))
    assert (has(store, 0, "a"), has(store, 0, "b")) == (True, False)
    with pytest.raises(TooLarge):
        RecordStore(max_bytes=SIZE - 1).put(0, "a", record(100))


def test_what_a_record_becomes_does_not_count_beside_it() -> None:
    """It takes room, but never more of a record than its limit can be asked for."""
    store = RecordStore(max_record_bytes=102)
    made = Record(b"b" * 100, b"[]", will=b"w" * 100, worker=1)
    store.put(0, "a", made)
    assert store.size == made.size > 200
    with pytest.raises(TooLarge):
        store.put(0, "a", Record(b"", b"[]", will=b"w" * 101, worker=1))
    store.end_worker(1)
    assert store.get(0, "a").body == b"w" * 100


def test_what_nobody_uses_is_forgotten() -> None:
    clock = Clock()
    store = RecordStore(seconds=10, clock=clock)
    for name, previous in (("a", ""), ("b", "a"), ("c", "")):
        store.put(0, name, record(previous=previous))
    clock.now = 8
    assert store.turns(0, "b", 100)  # which is a use of both
    clock.now = 15
    assert not has(store, 0, "c")
    assert store.turns(0, "b", 100)
    clock.now = 40
    store.put(1, "d", record())
    assert (len(store), store.size) == (1, record().size)


def test_questions() -> None:
    store = RecordStore()
    body, turns = memoryview(b"body"), memoryview(b"turns")
    assert answer(store, PutRecord(0, 1, 5, "a"), [body, turns]) == (Reply(1), [])
    assert answer(store, PutRecord(1, 2, 5, "b", "a"), [body[:2], turns[:2]]) == (Reply(2), [])
    assert answer(store, GetRecord(0, 3, 5, "b"), []) == (Reply(3), [b"bo"])
    assert answer(store, GetTurns(0, 4, 5, "b", 7), []) == (Reply(4), [b"turns", b"tu"])
    assert answer(store, GetTurns(0, 5, 5, "b", 6), []) == (Reply(5, "too_large", 7), [])
    assert answer(store, GetRecord(0, 3, 5, "b", 1), []) == (Reply(3, "too_large", 2), [])
    assert answer(store, DeleteRecord(0, 6, 5, "a"), []) == (Reply(6), [])
    assert answer(store, GetTurns(0, 7, 5, "b", 7), []) == (Reply(7, "not_found"), [])
    for message in (GetRecord(0, 8, 4, "b"), DeleteRecord(0, 8, 4, "b"), GetRecord(0, 8, 5, "a")):
        assert answer(store, message, []) == (Reply(8, "not_found"), [])
    for frames in ([], [body], [body] * 4):
        assert answer(store, PutRecord(0, 9, 5, "c"), frames) == (Reply(9, "invalid"), [])
    assert len(store) == 1


def test_what_is_gone_is_not_put_again() -> None:
    store = RecordStore()
    body = memoryview(b"body")
    assert answer(store, PutRecord(0, 1, 5, "a", replaces=True), [body, body]) == (Reply(1, "not_found"), [])
    answer(store, PutRecord(0, 2, 5, "a"), [body, body])
    assert answer(store, PutRecord(0, 3, 5, "a", replaces=True), [body[:1], body]) == (Reply(3), [])
    assert store.get(5, "a").body == b"b"
    assert answer(store, PutRecord(0, 4, 6, "a", replaces=True), [body, body]) == (Reply(4, "not_found"), [])
    assert len(store) == 1


def test_wills() -> None:
    """Of those that are still being made, and by the worker that has died."""
    store = RecordStore()
    body, will = memoryview(b"body"), memoryview(b"will")
    for number, (worker, name, frames) in enumerate(
        [
            (1, "open", 3),
            (1, "ended", 2),
            (2, "other's", 3),
            (1, "open and then ended", 3),
            (1, "open and then ended", 2),
        ]
    ):
        assert answer(store, PutRecord(worker, number, 5, name, "x"), [body, body, will][:frames]) == (
            Reply(number),
            [],
        )
    store.end_worker(1)
    assert store.get(5, "open") == Record(b"will", b"body", "x")
    assert [store.get(5, name).body for name in ("ended", "other's", "open and then ended")] == [b"body"] * 3
    store.end_worker(2)
    assert store.get(5, "other's").body == b"will"
    assert store.size == sum(store.get(5, name).size for name in ("open", "ended", "other's", "open and then ended"))


def test_small_frames_are_copied_and_large_ones_kept() -> None:
    store = RecordStore()
    small, large = memoryview(bytes(100)), memoryview(bytes(1 << 16))
    answer(store, PutRecord(0, 1, 5, "a"), [small, large])
    kept = store.get(5, "a")
    assert isinstance(kept.body, bytes)
    assert isinstance(kept.turns, memoryview)
    assert kept.turns.obj is large.obj
