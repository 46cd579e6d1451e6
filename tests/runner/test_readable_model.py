"""A model's folder with files that the server's user may not read, as in a container."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runner.config import RunnerConfig
from runner.model import UnsupportedModel, read_model_config
from tests.models import Family

NOBODY = 65534


@pytest.fixture
def folder(tiny_model: Callable[[Family], Path]) -> Iterator[Path]:
    """A model's, where everybody gets to; and the test's user is one whom permissions concern."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        copy = Path(name) / "model"
        shutil.copytree(tiny_model("llama"), copy)
        for path in (Path(name), copy):
            path.chmod(0o755)
        for file in copy.iterdir():
            file.chmod(0o644)
        root = os.geteuid() == 0
        yield copy
        if root:
            os.seteuid(0)
        copy.chmod(0o755)


def refusal(folder: Path) -> str:
    if os.geteuid() == 0:
        os.seteuid(NOBODY)
    with pytest.raises(UnsupportedModel) as caught:
        read_model_config(RunnerConfig(address=""), str(folder))
    return str(caught.value)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_file(folder: Path, name: str) -> None:
    (folder / "notes.md").touch(mode=0o000)  # nobody asks for this one
    (folder / name).chmod(0o000)
    assert f"may not read '{folder / name}': chmod" in refusal(folder)


def test_the_folder(folder: Path) -> None:
    folder.chmod(0o000)
    assert f"may not read '{folder}': chmod" in refusal(folder)
