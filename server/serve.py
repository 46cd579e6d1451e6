"""The `serve` command: binds the port, starts the runner, answers HTTP, and takes all of it down in order.

The port is bound first, so that a second server on it fails at once and not after loading a model. While the model
loads, probes are answered and everything else gets 503.

Exit status: 0 after a drain, 1 when something broke (the port is taken, the runner died), 3 when the model could not be
loaded with this configuration.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import resource
import shlex
import signal
import socket
import sys
from collections.abc import Generator
from typing import NoReturn

import uvicorn
import uvloop
from fastapi import FastAPI

from runner.messages import ModelInfo
from server.app import create_app
from server.config import ServerConfig
from server.engine_client import EngineClient
from server.errors import ENGINE_STOPPED, EngineFailed
from server.http_protocol import LimitedHttpProtocol
from server.lifecycle import Lifecycle
from server.listener import bind
from server.metrics import Metrics
from server.no_torch import keep_torch_out
from server.services import Services
from server.supervisor import RunnerProcess

logger = logging.getLogger("intarsia")

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CONFIGURATION = 3

_KEEP_ALIVE_SECONDS = 75
"""Longer than the 60 s for which proxies keep idle connections: who closes first must not be us."""
_FLUSH_SECONDS = 2.0
"""After their engine requests have failed, handlers get so long to send their error events."""
_RUNNER_EXIT_SECONDS = 5.0


def serve(config: ServerConfig) -> int:
    """Run the server until a signal or a failure ends it; returns the exit status."""
    try:
        listener = bind(config.host, config.port)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        print(f"intarsia: cannot listen on {config.host}:{config.port}: {reason}", file=sys.stderr)
        return EXIT_FAILED
    _configure_logging(config.log_level)
    _raise_file_limit()
    with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        server = _Server(config, listener)
        status = loop.run(server.run())
        if server.is_importing:
            _leave(status)  # The thread would be waited for; a signal that comes while loading is to be obeyed now.
        return status


class _Http(uvicorn.Server):
    """uvicorn without its signal handlers: they would close the listener at the first SIGTERM."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class _Server:
    """The parts of a running server, and the order in which they start and stop."""

    def __init__(self, config: ServerConfig, listener: socket.socket) -> None:
        self._config = config
        self._listener = listener
        self._engine = EngineClient(
            Metrics(config.model_names[0]),
            live_seconds=config.live_seconds,
            max_unaccepted_bytes=config.max_row_bytes,
        )
        self._lifecycle = Lifecycle(self._engine, ready_seconds=config.ready_seconds, live_seconds=config.live_seconds)
        self._runner: RunnerProcess | None = None
        self._stop = asyncio.Event()
        self.is_importing = False
        """Whether the thread that imports the tokenizer's library is at it."""

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        try:
            self._engine.start()
            self._runner = await RunnerProcess.start(self._config, self._engine.runner_address)
            return await self._serve(self._runner)
        finally:
            if self._runner is not None:
                await self._runner.stop()
            await self._engine.close()

    async def _serve(self, runner: RunnerProcess) -> int:
        app = create_app(self._config, self._engine, self._lifecycle)
        http = _Http(
            uvicorn.Config(
                app,
                http=LimitedHttpProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=int(_FLUSH_SECONDS),
            )
        )
        answering = asyncio.create_task(http.serve([self._listener]))
        died = asyncio.create_task(runner.wait())
        failed = asyncio.create_task(self._engine.wait_failed())
        stopped = asyncio.create_task(self._stop.wait())
        load = asyncio.create_task(self._load(app))
        ends = {answering, died, failed, stopped}
        try:
            await asyncio.wait({load, *ends}, return_when=asyncio.FIRST_COMPLETED)
            if load.done() and not load.result():
                return EXIT_CONFIGURATION
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not self._stop.is_set():
                return await self._after_death(runner, died)
            return await self._drain(died, failed)
        finally:
            http.should_exit = True
            await answering
            for task in (died, failed, stopped, load):
                task.cancel()
            await asyncio.gather(died, failed, stopped, load, return_exceptions=True)

    async def _load(self, app: FastAPI) -> bool:
        """Wait for the model, then give the routes what they work with. False if that is not possible with this model
        and configuration; a dead runner is somebody else's business."""
        importing = asyncio.create_task(asyncio.to_thread(self._import_transformers))
        try:
            model = await self._engine.wait_ready()
        except EngineFailed:
            return True
        try:
            await importing
            app.state.services = await asyncio.to_thread(self._services, model)
        except Exception as error:  # Whatever a model's files make the libraries raise: it is about those files.
            logger.debug("traceback", exc_info=error)
            print(f"intarsia: the model's tokenizer or templates cannot be used: {error}", file=sys.stderr)
            return False
        # What is there now stays: the collector need not walk through it again while it holds up every stream.
        gc.collect()
        gc.freeze()
        self._lifecycle.loaded = True
        print(self._greeting(), flush=True)
        return True

    def _import_transformers(self) -> None:
        """Called in a thread. Takes most of a second, in which the runner loads the model."""
        self.is_importing = True
        if not self._config.trust_remote_code:  # A model's own tokenizer code may import what it likes.
            keep_torch_out()
        from transformers import AutoTokenizer  # noqa: F401 - only the tokenizer is wanted of it

        self.is_importing = False

    def _services(self, model: ModelInfo) -> Services:
        """Called in a thread."""
        config = self._config
        return Services.load(
            self._engine,
            model,
            served_model_names=config.model_names,
            chat_template=config.chat_template,
            generation_config=config.generation_config,
            enable_prompt_embeds=config.enable_prompt_embeds,
            trust_remote_code=config.trust_remote_code,
        )

    async def _drain(self, *ends: asyncio.Task[object]) -> int:
        """Finish what is running, as long as it may take; the listener stays open and refuses the rest with 503."""
        self._lifecycle.draining = True
        logger.info("draining: %d requests in flight", self._lifecycle.in_flight)
        idle = asyncio.create_task(self._lifecycle.idle())
        await asyncio.wait({idle, *ends}, timeout=self._config.shutdown_timeout, return_when=asyncio.FIRST_COMPLETED)
        broken = any(end.done() for end in ends)
        if not idle.done():  # Out of time, or the runner has died.
            logger.warning("giving up %d requests", self._lifecycle.in_flight)
            self._engine.fail("The server is shutting down.")
            await asyncio.wait({idle}, timeout=_FLUSH_SECONDS)
        idle.cancel()
        return EXIT_FAILED if broken else EXIT_OK

    async def _after_death(self, runner: RunnerProcess, died: asyncio.Task[int]) -> int:
        """Tell the clients that are waiting, then leave. A runner that has reported a failure is about to exit: its own
        status says which kind it was."""
        self._engine.fail(ENGINE_STOPPED)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_SECONDS):
                await self._lifecycle.idle()
        await asyncio.wait({died}, timeout=_RUNNER_EXIT_SECONDS)
        status = await runner.stop()
        if not self._lifecycle.loaded and status == EXIT_CONFIGURATION:
            return EXIT_CONFIGURATION  # The runner has said why, on our standard error.
        logger.error("the runner has stopped (exit status %d)", status)
        return EXIT_FAILED

    def _on_signal(self) -> None:
        if not self._stop.is_set():
            self._stop.set()
            return
        # The second one: leave now, but leave nothing behind.
        if self._runner is not None:
            self._runner.kill()
        self._engine.remove_folder()
        _leave(EXIT_FAILED)

    def _greeting(self) -> str:
        host, port = self._listener.getsockname()[:2]
        shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
        base = f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
        name = self._config.model_names[0]
        body = json.dumps({"model": name, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0})
        curl = f"curl {base}/v1/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"
        if self._config.api_keys:
            curl += " -H 'Authorization: Bearer KEY'"
        return f"Intarsia is ready and serves {name}. Try: {curl}"


def _leave(status: int) -> NoReturn:
    """End the process without waiting for its threads."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)


def _configure_logging(level: str) -> None:
    """`level` is for what we log; libraries are only heard when something is wrong, or everything is wanted."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger().setLevel(logging.DEBUG if level == "debug" else logging.WARNING)
    for ours in ("intarsia", "server"):
        logging.getLogger(ours).setLevel(level.upper())


def _raise_file_limit() -> None:
    """Each client takes a file descriptor, and 1,024, a common default, are soon used up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
