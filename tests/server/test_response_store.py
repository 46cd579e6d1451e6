"""What is kept of responses: by whom it can be found, how much there is of it, and for how long."""

from __future__ import annotations

from server.responses.store import ResponseStore, StoredResponse


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def response(size: int = 0, previous: str | None = None) -> StoredResponse:
    return StoredResponse(b"b" * size, b"[]", b"[]", previous)


SIZE = response(100).size


def test_a_response_is_its_owners() -> None:
    store = ResponseStore()
    assert store.add(0, "a", response())
    assert store.add(None, "b", response())
    assert store.get(0, "a") == response()
    assert [store.get(1, "a"), store.get(None, "a"), store.get(0, "b")] == [None, None, None]
    assert not store.delete(1, "a")
    assert store.delete(0, "a")
    assert not store.delete(0, "a")
    assert store.get(0, "a") is None
    assert len(store) == 1


def test_a_conversation_is_its_owners_from_beginning_to_end() -> None:
    store = ResponseStore()
    for name, previous in (("a", None), ("b", "a"), ("c", "b"), ("other", "a")):
        store.add(0, name, response(previous=previous))
    found = store.conversation(0, "c")
    assert found is not None
    assert [each.previous for each in found] == [None, "a", "b"]
    assert store.conversation(1, "c") is None
    store.add(1, "theirs", response(previous="a"))
    assert store.conversation(1, "theirs") is None
    store.delete(0, "b")
    assert store.conversation(0, "c") is None
    assert store.conversation(0, "other") is not None


def test_no_more_than_so_many() -> None:
    store = ResponseStore(max_responses=3)
    for name in "abc":
        store.add(0, name, response())
    store.get(0, "a")
    store.add(0, "d", response())
    assert [store.get(0, name) is not None for name in "abcd"] == [True, False, True, True]


def test_no_more_than_so_many_bytes() -> None:
    store = ResponseStore(max_bytes=3 * SIZE)
    for number in range(10):
        store.add(0, str(number), response(100))
        assert store.size <= 3 * SIZE
    assert [number for number in range(10) if store.get(0, str(number))] == [7, 8, 9]
    for number in range(10):
        store.delete(0, str(number))
    assert (store.size, len(store)) == (0, 0)


def test_who_takes_most_loses() -> None:
    for store in (ResponseStore(max_responses=4), ResponseStore(max_bytes=4 * SIZE)):
        store.add(0, "quiet", response(100))
        for number in range(100):
            store.add(1, str(number), response(100))
        assert store.get(0, "quiet") is not None
        assert len(store) == 4


def test_one_that_is_too_large_is_not_kept() -> None:
    store = ResponseStore(max_response_bytes=SIZE)
    assert store.add(0, "a", response(100))
    assert not store.add(0, "b", response(101))
    assert store.get(0, "a") is not None
    assert store.get(0, "b") is None
    assert not ResponseStore(max_bytes=SIZE - 1).add(0, "a", response(100))


def test_what_nobody_uses_is_forgotten() -> None:
    clock = Clock()
    store = ResponseStore(seconds=10, clock=clock)
    for name, previous in (("a", None), ("b", "a"), ("c", None)):
        store.add(0, name, response(previous=previous))
    clock.now = 8
    assert store.conversation(0, "b") is not None  # which is a use of both
    clock.now = 15
    assert store.get(0, "c") is None
    assert store.conversation(0, "b") is not None
    clock.now = 40
    store.add(1, "d", response())
    assert (len(store), store.size) == (1, response().size)
