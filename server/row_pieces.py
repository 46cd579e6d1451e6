"""The rows of one embedding, made in pieces of half a megabyte to one: checked, cast to the model's dtype, hashed, and
put into memory that the runner can read. Pieces are made by two threads, in any order, those of a body while the rest
of it is still on its way, and its last one on the event loop. Called by `embeddings` and `arriving_file`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from hashlib import sha256

import numpy as np

from server.errors import Unavailable
from server.file_tensor import ITEM_BYTES, EmbeddingError
from server.pages import discard
from server.row_memory import RowMemory, Run, SharedMemory, row_memory
from server.row_values import cast_rows, max_group_rows, row_digests
from server.rows import Rows

_PIECE_BYTES = 512 * 1024
"""In the file or as rows, whichever is larger. The last piece is made after the last byte has come: half a millisecond,
or a whole one of a long body."""
_LARGE_PIECE_BYTES = 1024 * 1024
"""Of a long body more together: threads that ask for the interpreter's lock less often hinder each other less."""
_THREADS = 2
"""A third one would only wait for the interpreter's lock."""

_processes = 1


def share_cores(processes: int) -> None:
    """Says, before rows are made, how many processes of this kind the machine has."""
    global _processes
    _processes = processes


@cache
def threads() -> ThreadPoolExecutor:
    """Those that make rows. One of this process's cores is the event loop's: a thread that is given the interpreter's
    lock and has no core holds up everything, and threads that have one spend their time handing the lock around where
    bodies come to every process at once."""
    cores = _cores() // _processes
    return ThreadPoolExecutor(min(_THREADS, max(1, cores - 1)), thread_name_prefix="rows")


def _cores() -> int:
    """Those that this process may run on: a container has often a few of the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class RowPieces:
    """`make` every piece, then take `rows`. `source`: the file's dtype, `target`: the model's."""

    def __init__(
        self, num_rows: int, hidden_size: int, source: str, target: str, *, whole_digest: bool = False
    ) -> None:
        """`whole_digest`: of all rows' bytes, too. Raises Unavailable where there is no memory."""
        self.source_bytes = hidden_size * ITEM_BYTES[source]
        """Of a row in the file."""
        self._row_bytes = hidden_size * ITEM_BYTES[target]
        self._num_rows, self._hidden_size, self._source, self._target = num_rows, hidden_size, source, target
        # Whole groups, so that a row's digest doesn't depend on how the file was cut.
        group = max_group_rows(self._row_bytes)
        row_bytes = max(self.source_bytes, self._row_bytes)
        piece = min(max(_PIECE_BYTES, num_rows * row_bytes // 4), _LARGE_PIECE_BYTES)
        self.rows_per_piece = group * max(1, piece // (group * row_bytes))
        self.count = -(-num_rows // self.rows_per_piece)
        try:
            self._memory: RowMemory = row_memory(num_rows * self._row_bytes)
        except (OSError, MemoryError):
            raise _no_memory() from None
        self._digests: list[bytes] = [b""] * self.count
        self._refusals: dict[int, str] = {}
        """What is wrong with which piece. (An exception would lead to its frames, and these to the memory.)"""
        self._has_no_memory = False
        self._whole = WholeDigest() if whole_digest else None
        self._seconds = [0.0] * self.count

    def span(self, index: int) -> tuple[int, int]:
        """Of the piece in the file's values: its first byte, and the byte behind its last."""
        first = index * self.rows_per_piece
        last = min(first + self.rows_per_piece, self._num_rows)
        return first * self.source_bytes, last * self.source_bytes

    def make(self, index: int, values: Sequence[Run]) -> None:
        """`values`: the piece's bytes, in one or several runs. What is wrong with them, or that there is no memory,
        is told by `rows`."""
        if min(self._refusals, default=index) < index or self._has_no_memory:
            return  # the first one that is wrong is told
        started = time.perf_counter()
        first_row = index * self.rows_per_piece
        try:
            rows = self._take(first_row, values) if self._source == self._target else self._cast(first_row, values)
            if self._whole is not None:
                self._whole.add(index, rows, self._read)
        except EmbeddingError as error:
            self._refusals[index] = str(error)
        except (OSError, MemoryError):
            self._has_no_memory = True
        for each in values:
            discard(memoryview(each))
        self._seconds[index] = time.perf_counter() - started

    def _take(self, first_row: int, values: Sequence[Run]) -> memoryview:
        """Rows that are in the model's dtype already."""
        offset = first_row * self._row_bytes
        self._memory.write(offset, values)
        if len(values) == 1:
            rows = memoryview(values[0])
        else:
            rows = _buffer("joined", sum(map(len, values)))
            self._memory.read(offset, rows)
        cast_rows(rows, self._hidden_size, self._source, self._target, first_row=first_row)
        self._hash(first_row, rows)
        return rows

    def _cast(self, first_row: int, values: Sequence[Run]) -> memoryview:
        data = memoryview(values[0]) if len(values) == 1 else _joined(values)
        out = _buffer("cast", len(data) // self.source_bytes * self._row_bytes)
        rows = cast_rows(data, self._hidden_size, self._source, self._target, first_row=first_row, out=out)
        self._hash(first_row, rows)
        self._memory.write(first_row * self._row_bytes, [rows])
        return rows

    def _hash(self, first_row: int, rows: memoryview) -> None:
        self._digests[first_row // self.rows_per_piece] = row_digests(rows, self._row_bytes, first_row)

    def _read(self, index: int) -> memoryview:
        """A piece that has been made, for the thread that asks for it."""
        first = index * self.rows_per_piece
        size = min(self.rows_per_piece, self._num_rows - first) * self._row_bytes
        rows = _buffer("read", size)
        self._memory.read(first * self._row_bytes, rows)
        return rows

    @property
    def seconds(self) -> float:
        """Spent on them, in all threads together."""
        return sum(self._seconds)

    def rows(self) -> Rows:
        """Raises EmbeddingError (that of the first piece that has one), or Unavailable where there was no memory."""
        if self._has_no_memory:
            raise _no_memory()
        if self._refusals:
            raise EmbeddingError(self._refusals[min(self._refusals)])
        memory = self._memory
        shared = memory if isinstance(memory, SharedMemory) else None
        digests = b"".join(self._digests)
        try:
            view = memory.view
        except (OSError, MemoryError):  # a mapping takes a descriptor of its own
            raise _no_memory() from None
        whole = "" if self._whole is None else self._whole.hexdigest()
        return Rows(view, self._num_rows, self._hidden_size, self._target, digests, shared=shared, sha256=whole)


class WholeDigest:
    """sha256 of all pieces, which are made in any order. Each is hashed once those before it are, best by the thread
    that has just made it, in whose cache it is. Of the threads one hashes at a time, and no other waits for it."""

    def __init__(self) -> None:
        self._hash = sha256()
        self._next = 0
        self._made: set[int] = set()
        self._is_hashing = False
        self._lock = threading.Lock()

    def add(self, index: int, rows: memoryview, read: Callable[[int], memoryview]) -> None:
        """`rows`: of the piece; from now on `read` gives them, too. Raises what that does."""
        with self._lock:
            self._made.add(index)
            if self._is_hashing:  # and looks for more behind each
                return
            self._is_hashing = True
        while self._has_next():
            self._hash.update(rows if self._next == index else read(self._next))
            self._next += 1

    def _has_next(self) -> bool:
        with self._lock:
            self._is_hashing = self._next in self._made
            return self._is_hashing

    def hexdigest(self) -> str:
        """Once all are made."""
        return self._hash.hexdigest()


def _no_memory() -> Unavailable:
    return Unavailable("The server has no memory for these rows.", retry_after=1)


def make_all(pieces: RowPieces, values: Callable[[int, int], Sequence[Run]]) -> Rows:
    """All of them at once, from a thread that waits for it. `values`: gives the bytes from … to of the file's values,
    in one or several runs. Raises EmbeddingError, what `values` raises, and Unavailable."""

    def make(index: int) -> None:
        pieces.make(index, values(*pieces.span(index)))

    if pieces.count == 1:
        make(0)
    else:
        for _ in threads().map(make, range(pieces.count)):
            pass
    return pieces.rows()


_local = threading.local()


def _buffer(name: str, size: int) -> memoryview:
    """[size] bytes of this thread's, for as long as it makes one piece: memory of its own would have to be asked for
    again each time."""
    buffer: memoryview | None = getattr(_local, name, None)
    if buffer is None or len(buffer) < size:
        buffer = np.empty(max(size, _PIECE_BYTES), np.uint8).data
        setattr(_local, name, buffer)
    return buffer[:size]


def _joined(values: Sequence[Run]) -> memoryview:
    joined = _buffer("joined", sum(map(len, values)))
    target, at = np.frombuffer(joined, np.uint8), 0
    for each in values:
        target[at : at + len(each)] = np.frombuffer(each, np.uint8)  # without the GIL
        at += len(each)
    return joined
