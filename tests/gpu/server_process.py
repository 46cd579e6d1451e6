"""A server that `bench_serve` starts, waits for and stops, so that neither it nor its runner is left."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STOP_SECONDS = 20
"""How long the server may take to stop before it is killed,"""
RUNNER_SECONDS = 5
"""and its runner to follow it."""
_PR_SET_PDEATHSIG = 1


class MeasureError(Exception):
    """There is no going on with this server. The message is for the report."""


class Deadline:
    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._end - time.monotonic()


@contextmanager
def running_server(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The server, and at the end neither it nor its runner."""
    with open(log, "wb") as output:
        server = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, preexec_fn=die_with_parent)
    try:
        yield server
    finally:
        runners = _children(server.pid)
        end(server)
        # A runner ends by itself when its server has; one that hangs in the driver may not.
        for runner in runners:
            _kill_runner(runner)


def end(process: subprocess.Popen[Any]) -> None:
    """Politely, then not."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def _kill_runner(pid: int) -> None:
    deadline = time.monotonic() + RUNNER_SECONDS
    while _is_ours(pid):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.1)


def _is_ours(pid: int) -> bool:
    """Whether `pid` is still one of this project's processes: the number may be somebody else's by now."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"runner" in command or b"server.cli" in command


def _children(pid: int) -> list[int]:
    """Of all generations. Empty where the process has gone."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        direct = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []
    return [each for child in direct for each in (child, *_children(child))]


def die_with_parent() -> None:
    """Runs in the child: when this script is killed outright, the kernel ends its children."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def wait_ready(server: subprocess.Popen[bytes], port: int, deadline: Deadline, log: Path) -> float:
    """Seconds until /readyz said 200."""
    began = time.monotonic()
    while not _is_ready(port):
        if server.poll() is not None:
            raise MeasureError(f"the server exited with {server.returncode} while loading: {tail(log)}")
        if deadline.left < 10:
            raise MeasureError("the time limit came before the server was ready")
        time.sleep(0.05)
    return time.monotonic() - began


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tail(log: Path) -> str:
    return log.read_bytes()[-2000:].decode(errors="replace")
