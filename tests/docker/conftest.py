"""What the tests of docker/ share. Those marked `docker` need an engine, and run in `make docker-test`, which
says which one (`ENGINE`), where the tools are (`DOCKER_TOOLS`, a folder of programs) and more arguments of `build`
(`BUILD_ARGS`)."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker.engine import Engine

IMAGE = "localhost/intarsia-test:cpu"
_NOTES: list[str] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "ENGINE" in os.environ:
        return
    skip = pytest.mark.skip(reason="only in `make docker-test`")
    for item in items:
        if item.get_closest_marker("docker"):
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _NOTES:
        terminalreporter.section("what was used, and what was measured")
        for note in _NOTES:
            terminalreporter.write_line(note)


def note(text: str) -> None:
    """A line for the end of the run: what stood in for what, a size, a time."""
    _NOTES.append(text)


@pytest.fixture(scope="session")
def engine() -> Engine:
    return Engine(os.environ["ENGINE"])


@pytest.fixture(scope="session")
def tools() -> Path:
    """The folder with hadolint, podman-compose and a Python that has Helm."""
    folder = Path(os.environ.get("DOCKER_TOOLS", ""))
    if not (folder / "hadolint").exists():
        pytest.skip("DOCKER_TOOLS names no folder with hadolint, podman-compose and Helm")
    return folder.absolute()


@pytest.fixture(scope="session")
def image(engine: Engine) -> Iterator[str]:
    """The CPU image of this checkout; it stays, so that the next build is quick."""
    arguments = shlex.split(os.environ.get("BUILD_ARGS", ""))
    engine.build(IMAGE, "docker/Dockerfile", "--target", "cpu", "--build-arg", "REVISION=test", *arguments)
    size = engine.image(IMAGE)["Size"]
    base = engine.image("python:3.11-slim-bookworm")["Size"]
    note(f"CPU image: {size / 1e6:,.0f} MB, of which the base image {base / 1e6:,.0f} MB")
    yield IMAGE
