"""Starts a process of a server whose life is to be made hard.

    python -m tests.faults.launch server CONFIG_JSON        as tests.server.launch
    python -m tests.faults.launch runner RUNNER_CONFIG_JSON as python -m runner

Two things differ from the real ones. `time.time` jumps by up to years, forward and back, at every call: who measures a
duration with it gets nonsense. And SIGUSR1 makes the process write down how many objects Python's collector tracks, as
`objects-PID` in the folder that the environment variable REPORTS names.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import msgspec

YEARS = 5 * 365 * 86400


def jumping(clock: Callable[[], float]) -> Callable[[], float]:
    rng = random.Random(0)

    def jump() -> float:
        return clock() + rng.randint(-YEARS, YEARS)

    return jump


def report(number: int, frame: FrameType | None) -> None:
    gc.collect()
    folder = Path(os.environ["REPORTS"])
    draft = folder / f"draft-{os.getpid()}"
    draft.write_text(str(len(gc.get_objects())))
    draft.rename(folder / f"objects-{os.getpid()}")


def main() -> int:
    time.time = jumping(time.time)
    signal.signal(signal.SIGUSR1, report)
    if sys.argv[1] == "runner":
        from runner.__main__ import main as run

        del sys.argv[1]
        run()
        return 0
    from server.config import ServerConfig
    from server.serve import serve

    return serve(msgspec.json.decode(sys.argv[2], type=ServerConfig))


if __name__ == "__main__":
    sys.exit(main())
