"""What was freed is kept for the next body, and not without end."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
from server.malloc import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
def work():
    for _ in range(400):
        held = [bytearray(300_000) for _ in range(4)]
        del held
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(kind: str, **more: str) -> int:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", FAULTS, kind]
    return int(subprocess.run(command, env=environment | more, capture_output=True, check=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_memory_that_was_freed_is_used_again() -> None:
    assert faults("kept") < 20_000 < faults("not kept")


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_an_operator_decides_otherwise() -> None:
    assert faults("kept", MALLOC_TRIM_THRESHOLD_="0") > 20_000
