"""Memory for what is large and soon gone: request bodies, and the rows that are made of them.

Freeing a hundred megabytes at once takes six milliseconds, the interpreter's lock held, in whichever thread happens to
let go last: long enough to be seen in every stream of the process. `Pages` are given back by a thread of their own,
a few megabytes at a time.

Used by `body`, `multipart`, `arriving_json` and `arriving_file` for what they receive, by `embeddings`, `row_values`
and `row_memory` for what they make.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import threading
import time
from typing import Self

import numpy as np

SMALL_BYTES = 256 * 1024
"""What is not larger is ordinary memory: it is freed in microseconds."""

_PIECE_BYTES = 4 << 20
"""Given back at once: 0.3 ms."""
_AHEAD_BYTES = 256 * 1024
"""Asked for at once: 0.1 ms."""
_TURN_SECONDS = 20e-6
"""Long enough for a thread that waits to wake up. (After `sleep(0)` the same thread has the lock again before another
one has noticed that it was free.)"""
_MADV_DONTNEED: int | None = getattr(mmap, "MADV_DONTNEED", None)
_MADV_HUGEPAGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python 3.11 has no name for it


def give_turn() -> None:
    """Let another thread have the interpreter's lock, if one waits for it. For threads that hold it for most of a
    millisecond at a time."""
    time.sleep(_TURN_SECONDS)


class Pages(mmap.mmap):
    """[size] bytes of anonymous memory, zeros. Takes none before it is written to."""

    def __new__(cls, size: int) -> Self:
        """Raises MemoryError."""
        start_freeing()
        try:
            return super().__new__(cls, -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError:
            raise MemoryError from None

    def __del__(self) -> None:
        # Nothing refers to it any more, and what is `closed` has been here already.
        if not self.closed:
            _freeing.take(self)

    def populate(self, start: int, end: int) -> None:
        """This is going to be written to. Asking for pages together takes two thirds of the time that they take one by
        one, at the first write to each. `start`: a multiple of a page's size."""
        with contextlib.suppress(OSError, AttributeError):  # an older kernel, another system
            self.madvise(_MADV_POPULATE_WRITE, start, end - start)

    def give_back(self) -> None:
        """Piece by piece."""
        if _MADV_DONTNEED is not None:
            for start in range(0, len(self), _PIECE_BYTES):
                self.madvise(_MADV_DONTNEED, start, min(_PIECE_BYTES, len(self) - start))
                give_turn()

    def give_back_part(self, start: int, end: int) -> None:
        """Those of its pages that lie wholly between. They read as zeros then."""
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if _MADV_DONTNEED is not None and first < last:
            self.madvise(_MADV_DONTNEED, first, last - first)


class SharedView(mmap.mmap):
    """A file in memory, for reading."""

    def __new__(cls, descriptor: int, size: int) -> Self:
        start_freeing()
        return super().__new__(cls, descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)

    def __del__(self) -> None:
        if not self.closed:
            _freeing.take(self)


class _Freeing:
    """The thread that gives pages back."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Pages | SharedView | int] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    thread = threading.Thread(target=self._run, name="pages", daemon=True)
                    thread.start()
                    self._thread = thread  # only one that runs: what is taken later would wait for it for ever

    def take(self, freed: Pages | SharedView | int) -> None:
        """Memory, or a file's descriptor. From a destructor, so from any thread at any time: nothing here takes a lock
        of ours."""
        self._waiting.put(freed)

    def _run(self) -> None:
        while True:
            _free(self._waiting.get())


def _free(freed: Pages | SharedView | int) -> None:
    if isinstance(freed, int):
        os.close(freed)  # which gives up the interpreter's lock, and so does closing a mapping
        return
    if isinstance(freed, Pages):
        with contextlib.suppress(OSError, ValueError):  # a system that does not let them go in pieces
            freed.give_back()
    # The collector finds what is in a cycle before the views of it that are in the same: it is freed with the last.
    with contextlib.suppress(BufferError):
        freed.close()


_freeing = _Freeing()


def start_freeing() -> None:
    """Where what is freed later is made: its destructor may run when no thread can be started any more. Raises
    MemoryError where none can be now."""
    try:
        _freeing.start()
    except RuntimeError:
        raise MemoryError from None


def close_later(descriptor: int) -> None:
    """Of a file in memory: with the last descriptor its pages go, which takes milliseconds. From a destructor."""
    _freeing.take(descriptor)


def allocate(size: int) -> memoryview:
    """[size] bytes for a thread to write to, best without the interpreter's lock: in huge pages where the system has
    them, as numpy's own arrays are, which take a quarter of the time and now and then a millisecond to be found."""
    if size <= SMALL_BYTES:
        return memoryview(bytearray(size))
    pages = Pages(size)
    if _MADV_HUGEPAGE is not None:
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(_MADV_HUGEPAGE)
    return memoryview(pages)


def discard(view: memoryview) -> None:
    """Nobody reads `view` again: where it is of `Pages`, its memory is given back though others still refer to them."""
    if isinstance(view.obj, Pages) and view.nbytes:
        start = np.frombuffer(view, np.uint8).ctypes.data - np.frombuffer(view.obj, np.uint8).ctypes.data
        with contextlib.suppress(OSError):  # locked memory: it goes when nothing refers to it any more
            view.obj.give_back_part(start, start + view.nbytes)


class Gathered:
    """Bytes that come in chunks, in one piece. They are copied once and never moved by copying them."""

    def __init__(self) -> None:
        self._small = bytearray()
        self._pages: Pages | None = None
        self._size = self._populated = 0

    def __len__(self) -> int:
        return self._size

    def add(self, chunk: bytes | memoryview) -> None:
        """Not any more once there is a view of it. Raises MemoryError."""
        end = self._size + len(chunk)
        if self._pages is None and end <= SMALL_BYTES:
            self._small += chunk
        else:
            self._room_for(end)[self._size : end] = chunk
        self._size = end

    @property
    def view(self) -> memoryview:
        """All of them, read-only."""
        return memoryview(self._small if self._pages is None else self._pages).toreadonly()[: self._size]

    def _room_for(self, size: int) -> Pages:
        ahead = -(-size // _AHEAD_BYTES) * _AHEAD_BYTES
        if self._pages is None:
            self._pages = Pages(max(ahead, 4 * _AHEAD_BYTES))
            self._pages[: self._size] = self._small
            self._small = bytearray()
        elif ahead > len(self._pages):
            self._pages = _grown(self._pages, max(ahead, 2 * len(self._pages)))
        if ahead > self._populated:
            self._pages.populate(self._populated, ahead)
            self._populated = ahead
        return self._pages


def _grown(pages: Pages, size: int) -> Pages:
    try:
        pages.resize(size)  # moves pages, not bytes
    except OSError:
        raise MemoryError from None
    except SystemError:  # no mremap here: not Linux
        larger = Pages(size)
        larger[: len(pages)] = memoryview(pages)
        return larger
    return pages
