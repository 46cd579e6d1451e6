"""One server for all faults that a server has to survive; those that it may die of start their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.faulty_server import FaultyServer
from tests.models import Family


@pytest.fixture(scope="session")
def llama(tiny_model: Callable[[Family], Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="session")
def faulty(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyServer]:
    """A client that is not there any more is noticed within a second or two."""
    folder = tmp_path_factory.mktemp("faulty")
    with FaultyServer(folder, llama, silent_seconds=1.0) as server:
        yield server.wait_ready()
