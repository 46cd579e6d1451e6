"""`intarsia bench step` as its user runs it. Figures are not looked at: only that each kind of step has its line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.models import Family


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "server.cli", "bench", "step", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_line_for_each_kind_of_step(tiny_model: Callable[[Family], Path]) -> None:
    done = bench(str(tiny_model("llama")), "--device", "cpu", "--decode", "1,4", "--prefill", "16", "--context", "40")
    assert done.returncode == 0, done.stderr
    header, *lines = [line.split() for line in done.stdout.splitlines()]
    assert header == ["step", "ms", "host", "ms", "floor", "ms", "floor/step"]
    assert [" ".join(line[:2]) for line in lines] == ["decode 1", "decode 4", "prefill 16"]
    for line in lines:
        step, host, floor, share = map(float, line[2:])
        assert 0 < host <= step and floor >= 0 and 0 <= share < 1


def test_a_model_that_is_not_there() -> None:
    done = bench("/nowhere/model")
    assert done.returncode == 3 and "/nowhere/model" in done.stderr and "Traceback" not in done.stderr
