"""Rows that several threads copy are the rows, whatever their number."""

from __future__ import annotations

import threading
import time
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from runner import row_copies
from runner.row_copies import copy_rows

MIB = 1 << 20


@pytest.mark.parametrize("cores", [1, 2, 4, 16])
@pytest.mark.parametrize("rows", [1, 3, 1023, 2048, 5003])
def test_every_row_is_copied_once(rows: int, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_copies, "usable_cores", lambda: cores)
    source = np.random.default_rng(rows).integers(0, 256, (rows, 1024), np.uint8)
    source.flags.writeable = False  # as mapped rows are
    target = np.zeros((rows + 2, 1024), np.uint8)
    copy_rows(target[1:-1], source)
    assert np.array_equal(target[1:-1], source) and not target[[0, -1]].any()


class Noting(np.ndarray):
    """Notes who copies, and takes a while in other threads."""

    copies: ClassVar[list[tuple[int, threading.Thread]]] = []

    def __setitem__(self, key: Any, value: Any) -> None:
        thread = threading.current_thread()
        if thread is not threading.main_thread():
            time.sleep(0.05)
        self.copies.append((len(value), thread))
        super().__setitem__(key, value)


def noting(mib: int) -> NDArray[np.uint8]:
    Noting.copies.clear()
    return np.zeros((8 * mib, MIB // 8), np.uint8).view(Noting)


@pytest.mark.parametrize(("mib", "cores", "threads"), [(1, 16, 1), (2, 16, 3), (9, 16, 4), (9, 4, 2), (9, 2, 1)])
def test_threads_are_for_many_rows_and_cores(
    mib: int, cores: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_copies, "usable_cores", lambda: cores)
    copy_rows(noting(mib), np.zeros((8 * mib, MIB // 8), np.uint8))
    assert len(Noting.copies) == threads and sum(length for length, _ in Noting.copies) == 8 * mib
    assert sum(thread is threading.main_thread() for _, thread in Noting.copies) == 1


@pytest.mark.parametrize("started", [0, 1, 2])
def test_where_no_thread_can_be_started(started: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are copied all the same, and nothing of them later, when others are in their place."""
    source = np.random.default_rng(0).integers(0, 256, (64, MIB // 8), np.uint8)
    target = noting(8)
    start, left = threading.Thread.start, [None] * started

    def refuse(thread: threading.Thread) -> None:
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        start(thread)

    monkeypatch.setattr(row_copies, "usable_cores", lambda: 16)
    row_copies._pool.cache_clear()
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refuse)
        copy_rows(target, source)
    assert np.array_equal(target, source)
    target[:] = np.zeros_like(source)
    time.sleep(0.2)  # longer than a thread takes for what it has begun, and for one more
    assert not target.any()
    other = noting(8)
    copy_rows(other, source)
    assert np.array_equal(other, source) and len(Noting.copies) == 4  # they can be started again
