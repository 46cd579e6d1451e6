"""What receiving a body costs anyone: uvicorn as it comes, every setting its default, with `plain_app`, in a process of
its own. The baseline of `wire` and `receiving`."""

from __future__ import annotations

import subprocess
from types import TracebackType
from typing import Self

from tests import leash
from tests.bench.bodies import RAW, exchange
from tests.bench.frontend import cpu_seconds
from tests.server.harness import ROOT, eventually, free_port


class PlainUvicorn:
    """`with PlainUvicorn() as plain:`; ready when entered."""

    def __enter__(self) -> Self:
        self._port = free_port()
        arguments = ("uvicorn", "tests.bench.plain_app:app", "--port", str(self._port))
        self._process = leash.start(*arguments, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        eventually(self._answers, 60)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        leash.end(self._process)

    def receive(self, body: bytes) -> tuple[float, float]:
        """Seconds of time and of the process's CPU for a body."""
        before = cpu_seconds(self._process.pid)
        seconds, answer = exchange(self._port, "/", body, RAW)
        assert answer == b".", answer
        return seconds, cpu_seconds(self._process.pid) - before

    def _answers(self) -> bool:
        assert self._process.poll() is None, "uvicorn has ended"
        try:
            return exchange(self._port, "/", b"", RAW)[1] == b"."
        except OSError:
            return False
