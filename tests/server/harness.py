"""A real server in a process of its own, with a scripted runner behind it."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from tests import leash
from tests.server.scripted_runner import HOLD, NUDGE, Script

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
PORTS = itertools.cycle(range(10_000, 32_000))  # below what Linux hands out
"""Where this process looks for a port next: each begins elsewhere."""
next(itertools.islice(PORTS, os.getpid() * 7_919 % 22_000, None))


def free_port() -> int:
    """A port that nobody listens on. Not one that the system hands out: those go to the next client as well, and a
    server takes a second to listen. Not one of another test process's on this machine, most likely."""
    for _ in range(100):
        port = next(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"none of 100 ports up to {port} is free")


def eventually(probe: Callable[[], T], seconds: float = 60.0, *, pause: float = 0.02) -> T:
    """The first true answer of `probe`, asked after every `pause`; fails when there is none in time. (`seconds` is only
    how long a test waits for what never comes, on a machine that has other things to do: it is not to be tested.)"""
    deadline = time.monotonic() + seconds
    while not (answer := probe()):
        assert time.monotonic() < deadline, "this never became true"
        time.sleep(pause)
    return answer


class ServerProcess:
    """`with ServerProcess(script, folder) as server:`; `options` are fields of ServerConfig."""

    def __init__(self, script: Script, folder: Path, **options: Any) -> None:
        self.log_path = folder / "runner.jsonl"
        self.stderr_path = folder / "stderr"
        # Short: pytest's own folders are too long for a unix socket's path.
        self.sockets = Path(tempfile.mkdtemp(prefix="sockets-", dir="/tmp"))
        self.port = options.pop("port", None) or free_port()
        self.base = f"http://127.0.0.1:{self.port}"
        runner = (
            sys.executable,
            "-m",
            "tests.server.scripted_runner",
            replace(script, log=str(self.log_path)).to_json(),
        )
        self.launcher = ["tests.server.launch"]
        self.environment: dict[str, str] = {}
        self._config = {"port": self.port, "runner_command": runner, "served_model_name": ["scripted"], **options}

    def __enter__(self) -> Self:
        with open(self.stderr_path, "wb") as stderr:
            self.process = leash.start(
                *self.launcher,
                json.dumps(self._config),
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, "TMPDIR": str(self.sockets), **self.environment},
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        leash.end(self.process)
        for event in self.messages("start"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(event["pid"], signal.SIGKILL)
        shutil.rmtree(self.sockets, ignore_errors=True)
        if kind is not None:
            print(self.stderr)

    # --- what it says ---------------------------------------------------------------------------------------------

    @property
    def stderr(self) -> str:
        return self.stderr_path.read_text()

    def messages(self, kind: str) -> list[dict[str, Any]]:
        """What the runner logged."""
        if not self.log_path.exists():
            return []
        lines, _, _ = self.log_path.read_text().rpartition("\n")  # a line may be there in part
        events = [json.loads(line) for line in lines.splitlines()]
        return [event for event in events if event["kind"] == kind]

    @property
    def runner_pid(self) -> int:
        events = eventually(lambda: self.messages("start"))
        return int(events[0]["pid"])

    def runner_is_alive(self) -> bool:
        return is_alive(self.runner_pid)

    # --- what is done to it ---------------------------------------------------------------------------------------

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.base, timeout=60, **options)

    def status(self, path: str) -> int:
        """0 where nobody answers."""
        try:
            return httpx.get(self.base + path, timeout=30).status_code
        except httpx.TransportError:
            return 0

    def wait_ready(self) -> Self:
        def ready() -> bool:
            assert self.process.poll() is None, f"the server exited with {self.process.returncode}: {self.stderr}"
            return self.status("/readyz") == 200

        eventually(ready, 90, pause=0.05)
        return self

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def signal_runner(self, number: int) -> None:
        os.kill(self.runner_pid, number)

    @contextlib.contextmanager
    def held(self) -> Iterator[Callable[..., None]]:
        """The runner takes requests, and makes no step with them but as many as what this gives is told, which it waits
        for: what runs is still running however slow the test is."""
        self.signal_runner(HOLD)
        try:
            yield self._step
        finally:
            with contextlib.suppress(ProcessLookupError):
                self.signal_runner(HOLD)

    def _step(self, count: int = 1) -> None:
        for _ in range(count):
            made = len(self.messages("nudged"))
            self.signal_runner(NUDGE)
            eventually(lambda made=made: len(self.messages("nudged")) > made, pause=0.001)  # type: ignore[misc]

    def exit_status(self, seconds: float = 60) -> int:
        return self.process.wait(seconds)

    def complete(self, max_tokens: int, *, client: httpx.Client | None = None, **body: Any) -> httpx.Response:
        """One completion, not streamed."""
        send = (client or httpx).post
        return send(self.base + "/v1/completions", json=completion(max_tokens, **body), timeout=60)

    def open_stream(self, max_tokens: int, **body: Any) -> Stream:
        return Stream(self.port, "/v1/completions", completion(max_tokens, stream=True, **body))

    def leftovers(self) -> Sequence[Path]:
        """Socket folders that are still there."""
        return list(self.sockets.iterdir())


class Stream:
    """A streamed answer, read event by event; `close` hangs up."""

    def __init__(self, port: int, path: str, body: dict[str, Any], headers: Mapping[str, str] | None = None) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._connection.request(
            "POST", path, json.dumps(body), {"Content-Type": "application/json", **(headers or {})}
        )
        self.response = self._connection.getresponse()
        self.events = self._read()

    def _read(self) -> Iterator[str]:
        for line in self.response:
            if line.startswith(b"data: "):
                yield line[6:].decode().strip()

    def rest(self) -> list[str]:
        """Every event that is still to come; the connection is closed after them."""
        try:
            return list(self.events)
        finally:
            self.close()

    def close(self) -> None:
        self.response.close()
        self._connection.close()


def completion(max_tokens: int, **body: Any) -> dict[str, Any]:
    return {"model": "scripted", "prompt": [5, 6, 7], "max_tokens": max_tokens, "ignore_eos": True, **body}


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):  # gone before, or between the two
        return False
    return state != "Z"
