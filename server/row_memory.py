"""Memory for the rows of one embedding, which the runner then reads where they are: a file that is nowhere but in
memory (`memfd_create`), so that a gigabyte of rows is neither sent nor held twice. Used by `row_pieces`, which writes
to it, and by the engine client, which tells the runner of it.

What is small, or on a system without such files, is ordinary memory, and is sent.
"""

from __future__ import annotations

import fcntl
import os
import resource
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol
from weakref import WeakSet

from runner.messages import SHARED_PROBE, SharedRows
from server.pages import SMALL_BYTES, SharedView, allocate, close_later, start_freeing

Run = memoryview | bytearray
_MAX_RUNS = 1024
"""Of one call: Linux's own limit."""


_AS_ONE = 16
"""So many files may be as small as they like; twice as many have to be twice as large, and so on: what a file spares is
the sending of its bytes, what it takes is a descriptor, and another one to be read here. A request of hundreds of small
embeddings is sent."""
_PART_OF_DESCRIPTORS = 16
"""Of those that the process may have, files of rows take no more."""


class RowMemory(Protocol):
    """[size] bytes."""

    def write(self, offset: int, runs: Sequence[Run]) -> None:
        """One behind the other. From any thread. Raises OSError."""

    def read(self, offset: int, into: memoryview) -> None:
        """What has been written. Raises OSError."""

    @property
    def view(self) -> memoryview:
        """All of them, read-only. Nothing is written any more. Raises OSError."""


def row_memory(size: int) -> RowMemory:
    """Raises OSError or MemoryError where the system has none of either kind."""
    if size > _least_shared() and hasattr(os, "memfd_create"):
        try:
            return SharedMemory(size)
        except OSError:  # no descriptor is left, or the system has no such files
            pass
    return PrivateMemory(size)


def _least_shared() -> float:
    """Bytes; what is larger is a file."""
    count, limit = len(_files), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit != resource.RLIM_INFINITY and count >= limit // _PART_OF_DESCRIPTORS:
        return float("inf")
    return SMALL_BYTES * max(1.0, count / _AS_ONE)


def probe_memory() -> SharedMemory | None:
    """For the runner to try whether it can read this process's memory; None where there is none to share."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        memory = SharedMemory(len(SHARED_PROBE))
        memory.write(0, [memoryview(SHARED_PROBE)])
    except OSError:
        return None
    return memory


class PrivateMemory:
    def __init__(self, size: int) -> None:
        self._memory = allocate(size)

    def write(self, offset: int, runs: Sequence[Run]) -> None:
        for run in runs:
            self._memory[offset : offset + len(run)] = run
            offset += len(run)

    def read(self, offset: int, into: memoryview) -> None:
        into[:] = self._memory[offset : offset + len(into)]

    @property
    def view(self) -> memoryview:
        return self._memory.toreadonly()


class SharedMemory:
    """Is given back to the system when neither side refers to it any more, in a thread of its own (`pages`)."""

    def __init__(self, size: int) -> None:
        """Takes no memory before it is written to. Raises OSError or MemoryError."""
        start_freeing()
        self._size = size
        self._descriptor = os.memfd_create("intarsia-rows", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._descriptor, size)
        # Whoever maps it must find all of it there.
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        _files.add(self)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            close_later(self._descriptor)

    # Not through a mapping: a fault for every page takes nearly twice the time.

    def write(self, offset: int, runs: Sequence[Run]) -> None:
        rest = [memoryview(run) for run in runs]
        while rest:
            written = os.pwritev(self._descriptor, rest[:_MAX_RUNS], offset)
            offset += written
            while rest and written >= len(rest[0]):
                written -= len(rest.pop(0))
            if written:
                rest[0] = rest[0][written:]

    def read(self, offset: int, into: memoryview) -> None:
        while into:
            count = os.preadv(self._descriptor, [into], offset)
            if not count:
                raise OSError
            offset, into = offset + count, into[count:]

    @cached_property
    def view(self) -> memoryview:
        """Whoever reads it pays for it; where the rows are shared nobody does."""
        return memoryview(SharedView(self._descriptor, self._size))

    @property
    def told(self) -> SharedRows:
        """For the runner, while this object is there."""
        return SharedRows(os.getpid(), self._descriptor, os.fstat(self._descriptor).st_ino)


_files: WeakSet[SharedMemory] = WeakSet()
"""All of this process's."""
