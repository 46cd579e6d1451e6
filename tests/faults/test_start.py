"""Starts that cannot succeed, by the command that people type."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.harness import ROOT, free_port

SERVE = f"exec {sys.executable} -m server.cli serve --port {{port}}"


def start(script: str, cache: Path, *, wrapper: tuple[str, ...] = ()) -> tuple[int, str]:
    """Exit status and standard error of the default model's server, with its cache in `cache`."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "CACHE": str(cache)}
    command = [*wrapper, "sh", "-c", script.format(port=free_port())]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    return done.returncode, done.stderr


def assert_explained(status: int, stderr: str) -> None:
    assert status == 3, stderr
    (line,) = [line for line in stderr.splitlines() if line.startswith("intarsia: ")]
    assert "free 300 MiB there, or set XDG_CACHE_HOME" in line
    assert "Traceback" not in stderr


def test_a_full_disk_for_the_cache(tmp_path: Path) -> None:
    """A file system of its own, one mebibyte in size, that only this process sees."""
    wrapper = ("unshare", "--mount", "--map-root-user")
    probe = "mount -t tmpfs -o size=1m none $CACHE"
    if (
        shutil.which("unshare") is None
        or subprocess.run(
            [*wrapper, "sh", "-c", probe], env={**os.environ, "CACHE": str(tmp_path)}, capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("no file system can be mounted here")
    assert_explained(*start(f"{probe} && {SERVE}", tmp_path, wrapper=wrapper))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_disk_that_is_full_half_way(tmp_path: Path) -> None:
    """No file may become larger than 100 MB; the weights would."""
    assert_explained(*start(f"ulimit -f 200000 && {SERVE}", tmp_path))
    left = [path for path in (tmp_path / "intarsia").iterdir()]
    assert left == []
