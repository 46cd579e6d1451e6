"""The socket folder: nobody else's, and nothing is left of servers that were killed."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.private_dir import PrivateDir


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files that nobody else uses, with a path that is short enough."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    shutil.rmtree(folder)


def test_only_this_user_may_enter(base: Path) -> None:
    folder = PrivateDir()
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert folder.address("runner") == f"ipc://{folder.path}/runner"
    folder.remove()
    assert not folder.path.exists()
    folder.remove()


def test_abandoned_folders_are_removed_and_used_ones_are_not(base: Path) -> None:
    used, abandoned = PrivateDir(), PrivateDir()
    abandoned_path = abandoned.path
    os.close(abandoned._lock)  # What the kernel does for a server that is killed.
    third = PrivateDir()
    assert used.path.exists()
    assert not abandoned_path.exists()
    used.remove()
    third.remove()


def test_a_long_temporary_folder_is_avoided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = PrivateDir()
    assert len(folder.address("runner")) < 107
    folder.remove()
