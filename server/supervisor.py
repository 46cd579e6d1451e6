"""The server's child processes: the runner, and the API processes beside the first one.

None of them may outlive the server: each holds one end of a pipe or a channel whose other end is ours, and end-of-file
there, which also comes when the server is killed, tells it to stop. They have sessions of their own, so that Ctrl-C in
a terminal reaches the server alone, which drains before it stops them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence

import msgspec

from server.channel import Channel, Word
from server.child_environment import environment
from server.config import ServerConfig
from server.engine_client import EngineClient
from server.http_server import FLUSH_SECONDS
from server.worker import EXIT_CONFIGURATION, EXIT_FAILED, EXIT_OK, WorkerSpec

logger = logging.getLogger("intarsia")

_WORKER_COMMAND = (sys.executable, "-P", "-m", "server.worker")
_MAX_DEATHS = 3
_DEATH_WINDOW = 60.0
"""A worker that dies `_MAX_DEATHS` times in so many seconds is not started once more."""


class Child:
    """A process that stops when it is let go."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    def let_go(self) -> None:
        """Ask it to stop."""
        raise NotImplementedError

    async def wait(self) -> int:
        """Its exit status, once it has ended."""
        return await self._process.wait()

    async def stop(self, grace: float = 5.0) -> int:
        """Ask it to stop, and kill it if it has not after `grace` seconds. Returns its exit status."""
        self.let_go()
        try:
            async with asyncio.timeout(grace):
                await self._process.wait()
        except TimeoutError:
            self.kill()
        return await self._process.wait()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


class RunnerProcess(Child):
    @classmethod
    async def start(cls, config: ServerConfig, address: str) -> RunnerProcess:
        """Start the runner; it binds its socket at `address`. Its output goes where ours goes."""
        process = await asyncio.create_subprocess_exec(
            *config.runner_command,
            config.runner_config(address).to_json(),
            stdin=asyncio.subprocess.PIPE,
            env=environment(),
            start_new_session=True,
        )
        return cls(process)

    def let_go(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()


class WorkerProcess(Child):
    """An API process beside the first. A `listener.Taker`."""

    def __init__(self, process: asyncio.subprocess.Process, channel: Channel, number: int) -> None:
        super().__init__(process)
        self.number = number
        self.loaded = asyncio.Event()
        self.idle = asyncio.Event()
        """Set after "drain", when nothing is in flight; and when the process is gone."""
        self._channel = channel
        channel.listen(self._on_word, self.idle.set)

    @classmethod
    async def start(cls, spec: WorkerSpec) -> WorkerProcess:
        channel, theirs = Channel.pair()
        with theirs, contextlib.ExitStack() as on_failure:
            on_failure.callback(channel.close)
            description = msgspec.structs.replace(spec, channel_fd=theirs.fileno())
            process = await asyncio.create_subprocess_exec(
                *_WORKER_COMMAND,
                stdin=asyncio.subprocess.PIPE,
                env=environment(),
                start_new_session=True,
                pass_fds=(theirs.fileno(), spec.metrics_fd),
            )
            on_failure.pop_all()
        worker = cls(process, channel, spec.number)
        if process.stdin is not None:
            # Not on the command line, where everybody could read the API keys.
            process.stdin.write(msgspec.json.encode(description))
            process.stdin.close()
        return worker

    def take(self, connection: socket.socket) -> bool:
        return self._channel.hand_over(connection)

    def tell(self, word: Word) -> None:
        self._channel.tell(word)

    def let_go(self) -> None:
        self._channel.close()

    def _on_word(self, word: str, connection: socket.socket | None) -> None:
        if word == "loaded":
            self.loaded.set()
        elif word == "idle":
            self.idle.set()


class WorkerPool:
    """The API processes beside the first one: `config.api_workers` less one.

    One that dies is replaced: its clients lose their connections and the runner frees what they were using, but the
    loaded model and all other clients stay. One that cannot be loaded, or that keeps dying, ends the server (`broken`).
    """

    def __init__(self, spec: WorkerSpec, engine: EngineClient) -> None:
        self._spec = spec
        self._engine = engine
        self._numbers = itertools.count(1)
        self._workers: dict[int, WorkerProcess] = {}
        """By row."""
        self._keepers: list[asyncio.Task[None]] = []
        self._stopping = False
        self._broken = asyncio.Event()
        self._broken_status = EXIT_FAILED

    async def start(self) -> None:
        for row in range(1, self._spec.config.api_workers):
            await self._start(row)
            self._keepers.append(asyncio.create_task(self._keep(row)))

    def takers(self) -> Sequence[WorkerProcess]:
        """Those that can take connections."""
        return [worker for worker in self._workers.values() if worker.loaded.is_set()]

    async def loaded(self) -> None:
        """Until every worker has been loaded."""
        for worker in list(self._workers.values()):
            await worker.loaded.wait()

    async def broken(self) -> int:
        """Until a worker cannot be kept running. The exit status for the server."""
        await self._broken.wait()
        return self._broken_status

    def drain(self) -> None:
        self._stopping = True
        for worker in self._workers.values():
            worker.tell("drain")

    async def idle(self) -> None:
        """After `drain`: until nothing is in flight in any of them."""
        for worker in list(self._workers.values()):
            await worker.idle.wait()

    async def stop(self, *, failed: bool = False) -> None:
        """End them; their open requests get an error. `failed`: because the runner is gone."""
        self._stopping = True
        workers = list(self._workers.values())
        if failed:
            for worker in workers:
                worker.tell("failed")
        await asyncio.gather(*(worker.stop(3 * FLUSH_SECONDS) for worker in workers))
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    def kill(self) -> None:
        for worker in self._workers.values():
            worker.kill()

    async def _start(self, row: int) -> WorkerProcess:
        spec = msgspec.structs.replace(self._spec, number=next(self._numbers), row=row)
        worker = self._workers[row] = await WorkerProcess.start(spec)
        return worker

    async def _keep(self, row: int) -> None:
        """Put a new worker where one has died."""
        deaths: deque[float] = deque(maxlen=_MAX_DEATHS)
        while True:
            worker = self._workers[row]
            status = await worker.wait()
            del self._workers[row]
            worker.let_go()
            worker.idle.set()
            self._engine.worker_gone(worker.number)
            if self._stopping and status == EXIT_OK:
                return
            logger.error("API worker %d has died (%s)", row, describe(status))
            if self._stopping:
                return
            deaths.append(time.monotonic())
            keeps_dying = len(deaths) == _MAX_DEATHS and deaths[-1] - deaths[0] < _DEATH_WINDOW
            if keeps_dying or not worker.loaded.is_set():
                logger.error("API worker %d cannot be kept running: stopping the server", row)
                self._broken_status = EXIT_CONFIGURATION if status == EXIT_CONFIGURATION else EXIT_FAILED
                self._broken.set()
                return
            try:
                await self._start(row)
            except OSError as error:  # no process, no memory or no descriptor to be had
                logger.error("API worker %d cannot be started (%s): stopping the server", row, error.strerror)
                self._broken.set()
                return


def describe(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit status {status}"
