"""Large memory: it is what was put into it, and is given back to the system soon after the last reference to it."""

from __future__ import annotations

import gc
import mmap
import random
import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from server import pages
from server.errors import Unavailable
from server.pages import SMALL_BYTES, Gathered, Pages, allocate, discard
from server.row_pieces import RowPieces
from tests.server.harness import eventually

MIB = 1 << 20


def resident() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


@pytest.fixture(autouse=True)
def nothing_is_left() -> None:
    """Of other tests in this process, which would be given back meanwhile and be counted."""
    gc.collect()
    last = threading.Event()
    Last(MIB, last)
    assert last.wait(60)


class Last(Pages):
    """Says when it is given back: what was let go of before has been by then."""

    def __new__(cls, size: int, given_back: threading.Event) -> Last:
        made = super().__new__(cls, size)
        made.given_back = given_back.set
        return made

    given_back: Callable[[], None]

    def close(self) -> None:
        super().close()
        self.given_back()


def is_unmapped(address: int) -> bool:
    spans = (line.split(maxsplit=1)[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return not any(int(first, 16) <= address < int(last, 16) for first, last in spans)


@pytest.mark.parametrize("size", [0, 1, SMALL_BYTES, SMALL_BYTES + 1, 5 * MIB + 3])
def test_what_is_gathered_is_what_came(size: int) -> None:
    data = random.Random(size).randbytes(size)
    for step in (size or 1, 70_001, 300_000):
        gathered = Gathered()
        for start in range(0, size, step):
            gathered.add(data[start : start + step])
        assert len(gathered) == size
        assert gathered.view == data
        assert gathered.view.readonly


def test_it_grows_without_mremap(monkeypatch: pytest.MonkeyPatch) -> None:
    def resize(self: Pages, size: int) -> None:
        raise SystemError

    monkeypatch.setattr(Pages, "resize", resize, raising=False)
    gathered, chunk = Gathered(), random.Random(0).randbytes(100_000)
    for _ in range(40):
        gathered.add(memoryview(chunk))
    assert gathered.view == chunk * 40


def test_it_takes_little_more_than_what_came() -> None:
    gathered = Gathered()
    for _ in range(33):
        gathered.add(b"x" * MIB)
    before = resident()
    gathered.add(b"x" * 10)  # it has room for 64 MiB now
    assert resident() < before + 8 * MIB


def test_without_a_system_that_gives_pages_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.pages._MADV_POPULATE_WRITE", 12345)
    gathered = Gathered()
    for value in range(4):
        gathered.add(bytes([value]) * 300_000)
    assert gathered.view == b"".join(bytes([value]) * 300_000 for value in range(4))


def test_what_is_allocated_can_be_written_to() -> None:
    for size in (0, 10, SMALL_BYTES, SMALL_BYTES + 1, 5 * MIB + 3):
        memory = allocate(size)
        assert bytes(memory) == bytes(size)
        memory[:] = b"x" * size
        assert bytes(memory) == b"x" * size


def test_it_is_given_back_once_nothing_refers_to_it() -> None:
    """However it is referred to, and wherever the last reference goes."""
    before = resident()
    gathered = Gathered()
    for _ in range(64):
        gathered.add(b"x" * MIB)
    array = np.frombuffer(gathered.view[MIB:], np.uint8)
    assert resident() > before + 40 * MIB
    del gathered
    assert array[-1] == ord("x")
    held = [array]
    del array
    assert resident() > before + 40 * MIB
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    eventually(lambda: resident() < before + 8 * MIB)


def test_it_is_given_back_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, int]] = []
    madvise = Pages.madvise

    def note(self: Pages, option: int, start: int, length: int) -> None:
        if len(self) == 13 * MIB + 5:  # and not what other tests have left
            given.append((start, length))
        madvise(self, option, start, length)

    monkeypatch.setattr(Pages, "madvise", note)
    pages = Pages(13 * MIB + 5)
    pages[:] = b"x" * len(pages)
    del pages
    eventually(lambda: len(given) == 4)
    assert given == [(0, 4 * MIB), (4 * MIB, 4 * MIB), (8 * MIB, 4 * MIB), (12 * MIB, MIB + 5)]


def test_a_part_is_given_back_while_the_rest_is_used() -> None:
    gathered = Gathered()
    for value in range(64):
        gathered.add(bytes([value + 1]) * MIB)
    before = resident()
    view = gathered.view
    page = mmap.PAGESIZE
    discard(view[MIB + 1 : 63 * MIB - 1].cast("B"))
    assert resident() < before - 40 * MIB
    assert view[: MIB + page] == bytes([1]) * MIB + bytes([2]) * page  # whole pages only
    assert view[MIB + page] == view[63 * MIB - page - 1] == 0
    assert view[63 * MIB - page :] == bytes([63]) * page + bytes([64]) * MIB
    for part in (view[:0], view[5:20], memoryview(b"abc")):
        discard(part)
    assert view[:20] == bytes([1]) * 20


def test_it_takes_nothing_before_it_is_written_to() -> None:
    before = resident()
    pages = Pages(1 << 30)
    assert resident() < before + 8 * MIB
    pages.close()


def test_where_pages_do_not_go_in_pieces_they_go_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the thread that gives them back goes on."""

    def refuse(*args: object) -> None:
        raise OSError

    monkeypatch.setattr(Pages, "madvise", refuse)
    for _ in range(3):
        pages = Pages(48 * MIB)
        address = np.frombuffer(pages, np.uint8).ctypes.data
        assert not is_unmapped(address)
        del pages
        eventually(partial(is_unmapped, address))


def test_what_the_collector_finds_does_not_end_the_thread() -> None:
    """It finalises what is in a cycle before it lets go of the views of it that are in the same."""
    before = resident()
    pages = Pages(48 * MIB)
    pages[:] = b"x" * len(pages)
    view = memoryview(pages)
    pages.__del__()
    eventually(lambda: resident() < before + 8 * MIB)
    other = Pages(48 * MIB)
    other[:] = b"x" * len(other)
    del other
    eventually(lambda: resident() < before + 8 * MIB)
    view.release()


def test_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no memory now, and there is later."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(pages, "_freeing", pages._Freeing())
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refuse)
        for _ in range(2):
            with pytest.raises(MemoryError):
                Pages(MIB)
            with pytest.raises(Unavailable):
                RowPieces(1000, 1000, "float32", "float32")
    assert len(Pages(MIB)) == MIB and pages._freeing._thread is not None and pages._freeing._thread.is_alive()
