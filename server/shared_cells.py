"""Numbers that all API processes can read and each writes its own of: what `metrics` counts in.

A row of doubles for each worker, in memory that all of them map. Adding to a cell is an addition in place, with no
lock (one writer a row, and an aligned double is never half written) and no system call, since some cells change with
every token. (`prometheus_client`'s multiprocess mode does the same through files and takes ten times as long for each
observation.) The memory has no name, so nothing is ever left behind; and a worker that takes a dead one's place goes on
in its row, so sums never fall.
"""

from __future__ import annotations

import mmap
import os


class SharedCells:
    """`fd` None: new memory, all zeros; else that of another process."""

    def __init__(self, rows: int, cells: int, fd: int | None = None) -> None:
        size = rows * cells * 8
        if fd is None:
            fd = os.memfd_create("intarsia-metrics")
            os.ftruncate(fd, size)
        self.fd = fd
        self._rows, self._cells = rows, cells
        self._all = memoryview(mmap.mmap(fd, size)).cast("d")

    def row(self, index: int) -> memoryview[float]:
        """[cells] doubles, to be written by one process only."""
        return self._all[index * self._cells : (index + 1) * self._cells]

    def totals(self) -> list[float]:
        """The sum of all rows."""
        values: list[float] = [*self._all]
        if self._rows == 1:
            return values
        return [sum(values[cell :: self._cells]) for cell in range(self._cells)]
