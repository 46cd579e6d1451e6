"""How many threads make rows."""

from __future__ import annotations

import pytest

from server import row_pieces


@pytest.mark.parametrize(
    ("cores", "processes", "threads"),
    [(1, 1, 1), (2, 1, 1), (3, 1, 2), (64, 1, 4), (16, 8, 1), (16, 4, 3), (4, 8, 1)],
)
def test_processes_share_the_cores_that_they_may_use(
    monkeypatch: pytest.MonkeyPatch, cores: int, processes: int, threads: int
) -> None:
    """One of each process's is its event loop's."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr("os.cpu_count", lambda: 128)
    monkeypatch.setattr(row_pieces, "_processes", 1)
    row_pieces.share_cores(processes)
    assert row_pieces.threads.__wrapped__()._max_workers == threads
