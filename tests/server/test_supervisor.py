"""What becomes of a server whose API process cannot be replaced. The rest of the supervisor is in test_workers and
test_serve."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from server import supervisor
from server.config import ServerConfig
from server.metrics import Metrics
from server.shared_cells import SharedCells
from server.supervisor import WorkerPool
from server.worker import EXIT_FAILED, WorkerSpec


class _Engine:
    gone = 0

    def worker_gone(self, number: int) -> None:
        self.gone += 1


def test_no_process_can_be_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Not a server that goes on with fewer than it was told to have, and says nothing."""
    monkeypatch.setattr(supervisor, "_WORKER_COMMAND", (sys.executable, "-c", "input()"))
    cells = SharedCells(2, Metrics.CELLS)
    engine: Any = _Engine()

    async def main() -> int:
        pool = WorkerPool(WorkerSpec(ServerConfig(api_workers=2), str(tmp_path), metrics_fd=cells.fd), engine)
        await pool.start()
        (worker,) = pool._workers.values()
        worker.loaded.set()
        monkeypatch.setattr(supervisor, "_WORKER_COMMAND", (str(tmp_path / "nothing"),))
        worker.kill()
        async with asyncio.timeout(20):
            return await pool.broken()

    with caplog.at_level(logging.ERROR):
        assert asyncio.run(main()) == EXIT_FAILED
    assert engine.gone == 1
    assert "API worker 1 cannot be started (No such file or directory): stopping the server" in caplog.text
