"""Servers for the tests in this folder: real ones, with a scripted runner behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.models import Family
from tests.server.harness import ServerProcess
from tests.server.scripted_runner import Script


class StartServer(Protocol):
    def __call__(self, script: dict[str, Any] | None = None, **options: Any) -> ServerProcess:
        """A server that is starting; `script`: fields of Script, `options`: fields of ServerConfig."""


@pytest.fixture
def start_server(tiny_model: Callable[[Family], Path], tmp_path: Path) -> Iterator[StartServer]:
    with ExitStack() as stack:
        count = 0

        def start(script: dict[str, Any] | None = None, **options: Any) -> ServerProcess:
            nonlocal count
            count += 1
            folder = tmp_path / f"server{count}"
            folder.mkdir()
            fields = Script(**{"model": str(tiny_model("llama")), **(script or {})})
            return stack.enter_context(ServerProcess(fields, folder, **options))

        yield start


@pytest.fixture(scope="module")
def server(tiny_model: Callable[[Family], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One ready server for all tests of a module, which leave it as they found it."""
    script = Script(model=str(tiny_model("llama")))
    with ServerProcess(script, tmp_path_factory.mktemp("server")) as server:
        yield server.wait_ready()
