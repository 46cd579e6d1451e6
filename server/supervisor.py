"""The runner as a child process of the server.

It must never outlive the server: its standard input is a pipe that nobody writes to, and end-of-file there, which also
comes when the server is killed, tells it to stop. It has a session of its own, so that Ctrl-C in a terminal reaches the
server alone, which drains before it stops the runner.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sysconfig
from pathlib import Path

import runner.config
from server.config import ServerConfig


class RunnerProcess:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

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

    async def wait(self) -> int:
        """Its exit status, once it has ended."""
        return await self._process.wait()

    async def stop(self, grace: float = 5.0) -> int:
        """Ask it to stop, and kill it if it has not after `grace` seconds. Returns its exit status."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(grace):
                await self._process.wait()
        except TimeoutError:
            self.kill()
        return await self._process.wait()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


def environment() -> dict[str, str]:
    """Ours; and where the package is run from a checkout that is not installed, the way to it, since the runner's
    Python does not look into the current folder."""
    environment = dict(os.environ)
    root = Path(runner.config.__file__).resolve().parent.parent
    if root != Path(sysconfig.get_path("purelib")).resolve():
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), environment.get("PYTHONPATH"))))
    return environment
