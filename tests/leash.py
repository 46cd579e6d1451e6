"""Processes that don't outlive the one that has started them: servers for tests and benchmarks.

`start` runs a module as `python -m` does, through this one, which ends it when its standard input does. The other end
of that pipe is held by the process that called `start`, and is closed when that one is killed, too, as pytest is by the
timeout of a test. (The kernel's own way, PR_SET_PDEATHSIG, looks at the thread that has started a process, and tests
have several.)
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import threading
from typing import Any


def start(module: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """`options`: of Popen."""
    command = [sys.executable, "-m", "tests.leash", module, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, **options)


def end(process: subprocess.Popen[bytes]) -> None:
    """Waits for one that has been told to stop, and closes what it was held by."""
    try:
        process.wait()
    finally:
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def _exit_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


def main() -> None:
    threading.Thread(target=_exit_with_parent, name="leash", daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
