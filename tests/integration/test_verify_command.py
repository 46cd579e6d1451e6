"""`intarsia verify` as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def verify(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "server.cli", "verify", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_a_good_model_passes(llama: Path) -> None:
    done = verify(str(llama), "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "embeds" in done.stdout and "ids" in done.stdout


def test_no_model_is_a_clear_error(tmp_path: Path) -> None:
    done = verify(str(tmp_path / "nothing"))
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
