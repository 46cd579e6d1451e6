"""The `serve` command: binds the port, starts the runner and the API processes, and takes all of it down in order.

The port is bound first, so that a second server on it fails at once and not after loading a model. While the model
loads, probes are answered and everything else gets 503.

The process of the command is itself the first API process, and accepts the connections for all of them; a server with
one worker is this process and the runner.

Exit status: 0 after a drain, 1 when something broke (the port is taken, the runner died), 3 when the model or the
certificate could not be loaded with this configuration.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import uvloop

from server.auth import hashed
from server.config import ServerConfig
from server.errors import ENGINE_STOPPED, EngineFailed
from server.listener import Dealer, Taker, bind
from server.metrics import Metrics
from server.private_dir import PrivateDir
from server.probe_port import ProbePort
from server.shared_cells import SharedCells
from server.supervisor import RunnerProcess, WorkerPool
from server.tls import Certificate, UnusableCertificate
from server.worker import (
    EXIT_CONFIGURATION,
    EXIT_FAILED,
    EXIT_OK,
    SHUTTING_DOWN,
    UnusableModel,
    Worker,
    WorkerSpec,
    configure_process,
    leave,
)

logger = logging.getLogger("intarsia")

_RUNNER_EXIT_SECONDS = 5.0


def serve(config: ServerConfig) -> int:
    """Run the server until a signal or a failure ends it; returns the exit status."""
    config = replace(config, api_keys=hashed(config.api_keys))
    with ExitStack() as stack:
        try:
            certificate = None if config.certificate_files is None else Certificate(config.certificate_files)
            listeners = [stack.enter_context(_listen(config, port)) for port in _ports(config)]
        except UnusableCertificate as error:
            print(f"intarsia: {error}", file=sys.stderr)
            return EXIT_CONFIGURATION
        except _CannotListen as error:
            print(f"intarsia: {error}", file=sys.stderr)
            return EXIT_FAILED
        configure_process(config)
        folder = PrivateDir()
        stack.callback(folder.remove)
        loop = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        server = _Server(config, listeners, folder, certificate)
        status = loop.run(server.run())
        if server.is_importing:
            leave(status)  # The thread would be waited for; a signal that comes while loading is to be obeyed now.
        return status


def _ports(config: ServerConfig) -> list[int]:
    """The API's first."""
    return [config.port] if config.probe_port is None else [config.port, config.probe_port]


class _CannotListen(Exception):
    """The message is for the operator."""


def _listen(config: ServerConfig, port: int) -> socket.socket:
    try:
        return bind(config.host, port, config.silent_seconds)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise _CannotListen(f"cannot listen on {config.host}:{port}: {reason}") from error


class _Server:
    """The parts of a running server, and the order in which they start and stop."""

    def __init__(
        self,
        config: ServerConfig,
        listeners: Sequence[socket.socket],
        folder: PrivateDir,
        certificate: Certificate | None,
    ) -> None:
        """`listeners`: the API's, and perhaps the probes'."""
        self._config = config
        self._listener, *self._probe_listeners = listeners
        self._folder = folder
        cells = SharedCells(config.api_workers, Metrics.CELLS)
        spec = WorkerSpec(config, str(folder.path), process=os.getpid(), created=int(time.time()), metrics_fd=cells.fd)
        self._worker = Worker(spec, cells, certificate)
        self._pool = WorkerPool(spec, self._worker.engine)
        self._runner: RunnerProcess | None = None
        self._stop = asyncio.Event()

    @property
    def is_importing(self) -> bool:
        return self._worker.is_importing

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        worker = self._worker
        dealer = Dealer(self._listener, self._takers)
        silent = self._config.silent_seconds
        probe_ports = [ProbePort(listener, worker.lifecycle, silent) for listener in self._probe_listeners]
        try:
            worker.start()
            self._runner = await RunnerProcess.start(self._config, worker.engine.runner_address)
            await self._pool.start()
            return await self._serve(self._runner)
        finally:
            await self._pool.stop()
            dealer.close()
            self._listener.close()
            for port in probe_ports:
                await port.stop()
            await worker.stop()
            if self._runner is not None:
                await self._runner.stop()
            await worker.engine.close()
            self._folder.remove()

    def _takers(self) -> list[Taker]:
        """While any of them is loading, the first answers for all: or /readyz would say yes today and no tomorrow."""
        return [self._worker, *(self._pool.takers() if self._worker.lifecycle.loaded else ())]

    async def _serve(self, runner: RunnerProcess) -> int:
        died = asyncio.create_task(runner.wait())
        failed = asyncio.create_task(self._worker.engine.wait_failed())
        stopped = asyncio.create_task(self._stop.wait())
        load = asyncio.create_task(self._load())
        broken = asyncio.create_task(self._pool.broken())
        ends: set[asyncio.Task[Any]] = {died, failed, stopped, broken}
        try:
            await asyncio.wait({load, *ends}, return_when=asyncio.FIRST_COMPLETED)
            if load.done() and not load.result():
                return EXIT_CONFIGURATION
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._stop.is_set():
                return await self._drain(died, failed)
            if died.done() or failed.done():
                return await self._after_death(runner, died)
            if broken.result() == EXIT_CONFIGURATION:
                await load  # It finds the same, and says it.
            await self._worker.give_up(SHUTTING_DOWN)
            return broken.result()
        finally:
            for task in (*ends, load):
                task.cancel()
            await asyncio.gather(*ends, load, return_exceptions=True)

    async def _load(self) -> bool:
        """Until every worker is ready. False if that is not possible with this model and configuration; a dead runner
        is somebody else's business."""
        try:
            await self._worker.load()
        except EngineFailed:
            return True
        except UnusableModel as error:
            print(f"intarsia: {error}", file=sys.stderr)
            return False
        await self._pool.loaded()
        self._worker.lifecycle.loaded = True
        print(self._greeting(), flush=True)
        return True

    async def _drain(self, *ends: asyncio.Task[Any]) -> int:
        """Finish what is running, as long as it may take; the listener stays open and refuses the rest with 503."""
        lifecycle = self._worker.lifecycle
        lifecycle.draining = True
        self._pool.drain()
        where = " in the first process" if self._config.api_workers > 1 else ""
        logger.info("draining: requests in flight%s: %d", where, lifecycle.in_flight)
        idle = asyncio.gather(lifecycle.idle(), self._pool.idle())
        await asyncio.wait({idle, *ends}, timeout=self._config.shutdown_timeout, return_when=asyncio.FIRST_COMPLETED)
        broken = any(end.done() for end in ends)
        if not idle.done():  # Out of time, or the runner has died.
            logger.warning("giving up what is still running")
            await asyncio.gather(self._worker.give_up(SHUTTING_DOWN), self._pool.stop())
        idle.cancel()
        return EXIT_FAILED if broken else EXIT_OK

    async def _after_death(self, runner: RunnerProcess, died: asyncio.Task[int]) -> int:
        """Tell the clients that are waiting, then leave. A runner that has reported a failure is about to exit: its own
        status says which kind it was."""
        await asyncio.gather(self._worker.give_up(ENGINE_STOPPED), self._pool.stop(failed=True))
        await asyncio.wait({died}, timeout=_RUNNER_EXIT_SECONDS)
        status = await runner.stop()
        if not self._worker.lifecycle.loaded and status == EXIT_CONFIGURATION:
            return EXIT_CONFIGURATION  # The runner has said why, on our standard error.
        logger.error("the runner has stopped (exit status %d)", status)
        return EXIT_FAILED

    def _on_signal(self) -> None:
        if not self._stop.is_set():
            self._stop.set()
            return
        # The second one: leave now, but leave nothing behind.
        logger.warning("a second signal: leaving without waiting for what is still running")
        if self._runner is not None:
            self._runner.kill()
        self._pool.kill()
        self._folder.remove()
        leave(EXIT_FAILED)

    def _greeting(self) -> str:
        host, port = self._listener.getsockname()[:2]
        shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
        scheme = "https" if self._config.ssl_certfile else "http"
        base = f"{scheme}://[{shown}]:{port}" if ":" in shown else f"{scheme}://{shown}:{port}"
        name = self._config.model_names[0]
        body = json.dumps({"model": name, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0})
        curl = f"curl {base}/v1/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"
        if self._config.api_keys:
            curl += " -H 'Authorization: Bearer KEY'"
        return f"Intarsia is ready and serves {name}. Try: {curl}"
