"""Memory that the runner maps: what is written is what it finds, for as long as either side has it."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import sys
from pathlib import Path
from weakref import WeakSet

import numpy as np
import pytest

from runner.messages import SharedRows, Span
from runner.shared_rows import RowsGone, can_share, map_rows, with_shared
from server.pages import SMALL_BYTES
from server.row_memory import PrivateMemory, SharedMemory, probe_memory, row_memory
from tests.server.harness import eventually

SIZE = 3 * SMALL_BYTES + 5


def filled() -> tuple[SharedMemory, bytes]:
    data, memory = np.random.default_rng(0).bytes(SIZE), SharedMemory(SIZE)
    for start in range(0, SIZE, 100_000):
        part = memoryview(data)[start : start + 100_000]
        memory.write(start, [part[:30_000], bytearray(part[30_000:])])
    return memory, data


def test_a_process_ends_that_still_has_some() -> None:
    # In a cycle: what finds it is the interpreter's last collection, when no thread can be started any more.
    program = "from server.row_memory import SharedMemory; memory = SharedMemory(5); memory.itself = memory"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


def descriptors_of(inode: int) -> int:
    """How many this process has of the file: others come and go with what other tests have left."""
    count = 0
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += os.fstat(int(each)).st_ino == inode
    return count


def mappings_of(inode: int) -> int:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(line.split()[4] == str(inode) and "intarsia-rows" in line for line in lines)


def test_what_is_written_is_found_there() -> None:
    memory, data = filled()
    assert memory.view == data
    assert memory.view.readonly
    assert map_rows(memory.told, SIZE) == data
    assert map_rows(memory.told, SIZE).readonly


@pytest.mark.parametrize("make", [SharedMemory, PrivateMemory])
def test_many_runs_in_one(make: type[SharedMemory] | type[PrivateMemory]) -> None:
    """More than the system takes at once."""
    data, memory = np.random.default_rng(0).bytes(9_000), make(SIZE)
    memory.write(5, [memoryview(data)[at : at + 3] for at in range(0, 9_000, 3)])
    into = memoryview(bytearray(9_000))
    memory.read(5, into)
    assert into == data
    assert memory.view[5:9_005] == data


def test_a_system_that_takes_less_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwritev, os.preadv
    monkeypatch.setattr("os.pwritev", lambda file, runs, at: write(file, [runs[0][:70_000]], at))
    monkeypatch.setattr("os.preadv", lambda file, runs, at: read(file, [runs[0][:70_000]], at))
    memory, data = filled()
    into = memoryview(bytearray(SIZE))
    memory.read(0, into)
    assert into == memory.view == data


def test_the_runner_has_it_after_the_worker_has_let_go() -> None:
    memory, data = filled()
    told = memory.told
    assert (descriptors_of(told.inode), mappings_of(told.inode)) == (1, 0)
    rows = map_rows(told, SIZE)
    assert descriptors_of(told.inode) == 1  # thousands of stored embeddings take none
    del memory
    eventually(lambda: not descriptors_of(told.inode))
    assert rows == data
    assert mappings_of(told.inode) == 1
    part = np.frombuffer(rows, np.uint8)[5:10]
    del rows
    assert part.tobytes() == data[5:10]
    del part
    eventually(lambda: not mappings_of(told.inode))


def test_a_file_that_is_another_by_now_is_refused() -> None:
    memory, _ = filled()
    told = memory.told
    for other in (
        SharedRows(told.process, told.descriptor, told.inode + 1),
        SharedRows(told.process, 99_999, told.inode),
        SharedRows(2**30, told.descriptor, told.inode),
    ):
        with pytest.raises(RowsGone):
            map_rows(other, SIZE)
    for size in (SIZE - 1, SIZE + 1, 0, -1):
        with pytest.raises(RowsGone):
            map_rows(told, size)


def test_where_nothing_more_can_be_mapped_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoMapping:
        @staticmethod
        def mmap(*args: object) -> int:
            return 2**64 - 1

    monkeypatch.setattr("runner.shared_rows._libc", NoMapping)
    memory, data = filled()
    assert map_rows(memory.told, SIZE) == data


def test_the_probe_tells_whether_it_works() -> None:
    probe = probe_memory()
    assert probe is not None
    assert can_share(probe.told)
    assert not can_share(None)
    assert not can_share(SharedRows(probe.told.process, probe.told.descriptor, probe.told.inode + 1))
    other = SharedMemory(len(probe.view))
    assert not can_share(other.told)


def test_rows_are_put_into_their_places() -> None:
    memory, data = filled()
    spans = (Span(0, 1), Span(1, 1, shared=memory.told), Span(2, 1, stored="emb_a"))
    frames = [memoryview(each) for each in (b"ids", b"digests", b"rows", b"", b"")]
    assert with_shared(spans, frames, SIZE) == [b"ids", b"digests", b"rows", data, b""]
    assert with_shared(spans[:1], frames[:3], SIZE) == frames[:3]


def test_it_can_neither_grow_nor_shrink() -> None:
    """Whoever maps it may read all of it."""
    memory, _ = filled()
    for size in (0, 2 * SIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.told.descriptor, size)


def test_what_is_small_is_sent() -> None:
    assert isinstance(row_memory(SMALL_BYTES), PrivateMemory)
    assert isinstance(row_memory(SMALL_BYTES + 1), SharedMemory)


def test_without_descriptors_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("os.memfd_create", refuse)
    memory = row_memory(SMALL_BYTES + 1)
    assert isinstance(memory, PrivateMemory)
    memory.write(1, [memoryview(b"a"), bytearray(b"bc")])
    assert bytes(memory.view[:5]) == b"\0abc\0"
    with contextlib.suppress(OSError):
        SharedMemory(5)  # its destructor finds nothing to close


@pytest.fixture
def no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that other tests have left."""
    monkeypatch.setattr("server.row_memory._files", WeakSet())


def shared_among(count: int, size: int) -> list[bool]:
    made = [row_memory(size) for _ in range(count)]
    return [isinstance(each, SharedMemory) for each in made]


@pytest.mark.usefixtures("no_others")
def test_many_small_ones_are_sent() -> None:
    """A descriptor is worth a few hundred kilobytes as long as there are few of them."""
    assert sum(shared_among(300, SMALL_BYTES + 1)) == 17
    assert sum(shared_among(300, 4 * SMALL_BYTES)) == 64
    assert all(shared_among(60, 16 * SMALL_BYTES))
    assert all(shared_among(16, SMALL_BYTES + 1))  # the others are gone


@pytest.mark.usefixtures("no_others")
def test_descriptors_are_left_for_others() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 512 + 16 * (len(os.listdir("/proc/self/fd")) // 16)  # there is room, whatever other tests have left open
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        assert sum(shared_among(200, 1 << 30)) == limit // 16
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
