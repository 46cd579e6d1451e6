from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.real_server import RealServer
from tests.models import Family


@pytest.fixture(scope="session")
def llama(tiny_model: Callable[[Family], Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="session")
def server(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A tiny Llama in float32, with every check on; shared by all tests, none of which may harm it."""
    folder = tmp_path_factory.mktemp("server")
    with RealServer(folder, llama, dtype="float32", debug_checks=True, async_scheduling=True) as server:
        yield server.wait_ready()
