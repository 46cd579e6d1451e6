"""What a test has started goes with it, also when pytest is killed."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.models import Family
from tests.server.harness import ROOT, eventually, is_alive

TEST = """
import sys, time
from pathlib import Path
from tests.server.harness import ServerProcess
from tests.server.scripted_runner import Script

with ServerProcess(Script(model=sys.argv[1]), Path(sys.argv[2]), api_workers=2) as server:
    server.wait_ready()
    main = server.process.pid
    print(server.sockets, main, *Path(f"/proc/{main}/task/{main}/children").read_text().split(), flush=True)
    time.sleep(600)
"""


def test_a_server_does_not_outlive_the_test_that_started_it(
    tiny_model: Callable[[Family], Path], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", TEST, str(tiny_model("llama")), str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as test:
        assert test.stdout is not None
        sockets, *pids = test.stdout.readline().split()
        server, *children = map(int, pids)
        assert len(children) == 2  # the runner and the other API process
        assert all(map(is_alive, [server, *children]))
        test.send_signal(signal.SIGKILL)
    eventually(lambda: not any(map(is_alive, [server, *children])))
    shutil.rmtree(sockets)
