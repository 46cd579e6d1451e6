"""The server's end of one `grammar_child`: starts it, asks it, and kills it when it takes too long. Blocking: used by
the threads of `grammars`."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time

import msgspec

from server.child_environment import environment
from server.grammar_child import Job, Reply, Setup, write_frame

WALL_SECONDS = 4.0
"""For one grammar, whatever else the machine is doing: an answer is due within five."""
_START_SECONDS = 60.0
_MAX_REPLY_BYTES = 64 << 20

TOO_COSTLY = "too complex: it takes too long to compile, or too much memory"


class TokenizerUnsupported(Exception):
    """The compiler cannot work with this model's tokenizer."""


class GrammarProcess:
    """Raises TokenizerUnsupported; OSError when the process cannot be started."""

    def __init__(self, setup: Setup) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "server.grammar_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
            start_new_session=True,
        )
        self.is_alive = True
        reply = self._ask(setup, _START_SECONDS)
        if reply is None or reply.error:
            self.kill()
            if reply is None:
                raise OSError("the grammar compiler did not start")
            raise TokenizerUnsupported

    def compile(self, job: Job) -> Reply:
        """After `TOO_COSTLY` the process is gone."""
        reply = self._ask(job, WALL_SECONDS)
        if reply is None:
            self.kill()
            return Reply(error=TOO_COSTLY)
        return reply

    def interrupt(self) -> None:
        """Makes an answer that another thread waits for fail at once."""
        self._process.kill()

    def kill(self) -> None:
        self.is_alive = False
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _ask(self, message: Setup | Job, seconds: float) -> Reply | None:
        """None where no answer comes in time, or ever."""
        assert self._process.stdin is not None and self._process.stdout is not None  # noqa: S101
        deadline = time.monotonic() + seconds
        try:
            write_frame(self._process.stdin, message)
        except BrokenPipeError:
            return None
        header = self._read(4, deadline)
        size = int.from_bytes(header, "little")
        data = self._read(size, deadline) if len(header) == 4 and size <= _MAX_REPLY_BYTES else b""
        return msgspec.msgpack.decode(data, type=Reply) if data else None

    def _read(self, size: int, deadline: float) -> bytes:
        """Less than `size` bytes where the time is up or the process has ended."""
        assert self._process.stdout is not None  # noqa: S101
        descriptor, data = self._process.stdout.fileno(), b""
        poll = select.poll()  # not `select`, which knows no descriptor beyond 1,023
        poll.register(descriptor, select.POLLIN)
        while len(data) < size:
            left = max(0.0, deadline - time.monotonic())
            part = os.read(descriptor, size - len(data)) if poll.poll(left * 1000) else b""
            if not part:
                break
            data += part
        return data
