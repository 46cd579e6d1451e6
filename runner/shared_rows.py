"""Rows that a worker has in shared memory (`messages.SharedRows`), mapped into this process: no byte of them is copied
on the way here. Called by the endpoint's receiving thread; whoever holds the result holds the memory.

The worker's file is found through /proc and mapped for reading. It lives as long as somebody has it open or mapped, so
neither side has to be told when the other one is done, or has died.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.messages import SHARED_PROBE, SharedRows, Span

_PIECE_BYTES = 4 << 20
"""Unmapped at once: less than a millisecond. A multiple of a page's size."""


class RowsGone(Exception):
    """The worker has given the request up, or says what is not so; or this process has no descriptor or memory left."""


def can_share(probe: SharedRows | None) -> bool:
    """Whether this process can read the worker's files."""
    if probe is None:
        return False
    try:
        return bytes(map_rows(probe, len(SHARED_PROBE))) == SHARED_PROBE
    except RowsGone:
        return False


def with_shared(spans: Sequence[Span], frames: list[memoryview], row_size: int) -> list[memoryview]:
    """A `Generate` message's frames with those rows in their places that its spans say are shared. Raises RowsGone."""
    if not any(span.shared for span in spans) or len(frames) < len(spans):
        return frames
    first = len(frames) - len(spans)
    rows = [
        map_rows(span.shared, span.length * row_size) if span.shared is not None else frame
        for span, frame in zip(spans, frames[first:], strict=True)
    ]
    return [*frames[:first], *rows]


def map_rows(shared: SharedRows, size: int) -> memoryview:
    """The whole file, which must have `size` bytes: read-only. Raises RowsGone."""
    try:
        # Whatever else has that number now must not be waited for.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        descriptor = os.open(f"/proc/{shared.process}/fd/{shared.descriptor}", flags)
    except OSError:
        raise RowsGone from None
    try:
        status = os.fstat(descriptor)
        if status.st_ino != shared.inode or status.st_size != size or size <= 0:
            raise RowsGone
        return _mapped(descriptor, size).data
    except (OSError, MemoryError):
        raise RowsGone from None
    finally:
        os.close(descriptor)


def _mapped(descriptor: int, size: int) -> NDArray[np.uint8]:
    """[size]. Copied where there can't be another mapping: a process has 65,530 of them, by default."""
    address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address != _MAP_FAILED:
        _unmapping.start()
        return np.asarray(_Mapping(address, size))
    copy = np.empty(size, np.uint8)
    done = 0
    while done < size:
        read = os.preadv(descriptor, [copy.data[done:]], done)
        if not read:
            raise RowsGone
        done += read
    return copy


class _Mapping:
    """Python's own `mmap` keeps a descriptor for each: there may be thousands of stored embeddings."""

    def __init__(self, address: int, size: int) -> None:
        self._address, self._size = address, size

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "shape": (self._size,), "typestr": "|u1", "data": (self._address, True)}

    def __del__(self) -> None:
        # Often in the engine's thread, which has no ten milliseconds for it.
        _unmapping.take(self._address, self._size)


class _Unmapping:
    """The thread that gives mappings back, without the interpreter's lock."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="unmapping", daemon=True)
                self._thread.start()

    def take(self, address: int, size: int) -> None:
        """From a destructor, so from any thread at any time: nothing here takes a lock of ours."""
        self._waiting.put((address, size))

    def _run(self) -> None:
        while True:
            address, size = self._waiting.get()
            for start in range(0, size, _PIECE_BYTES):  # faults of other threads wait meanwhile
                _libc.munmap(address + start, min(_PIECE_BYTES, size - start))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value
_unmapping = _Unmapping()
