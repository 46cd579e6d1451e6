"""One API process's share of the server: its application, its engine client, and the connections that it is given.

The `serve` command has one in its own process; for every further API process it starts `python -m server.worker`, whose
description comes on standard input and whose connections and orders come over a `Channel`. Whatever workers have to
agree on (admission, aborts, memory for embeddings, what is stored) is the runner's business. They share memory for
their metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import uvloop

from runner.messages import ModelInfo
from server.app import create_app
from server.background_tasks import BackgroundTasks
from server.channel import Channel
from server.config import ServerConfig
from server.engine_client import EngineClient
from server.errors import ENGINE_STOPPED, EngineFailed
from server.http_server import FLUSH_SECONDS, HttpServer
from server.lifecycle import Lifecycle
from server.log_format import formatter
from server.malloc import keep_freed_memory
from server.metrics import Metrics
from server.no_torch import keep_torch_out
from server.probes import package_version
from server.row_pieces import share_cores
from server.row_values import hash_rows
from server.services import Services
from server.shared_cells import SharedCells
from server.soft_prompts import SoftPromptError
from server.timeouts import Timeouts
from server.tls import Certificate
from server.tracing import Tracing

logger = logging.getLogger("intarsia")

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CONFIGURATION = 3

SHUTTING_DOWN = "The server is shutting down."
_ORDER_SECONDS = 2.0
"""How long an order to leave may take to come after the news that there is a reason."""
_COLLECT_AFTER_OBJECTS = 20_000
_SWITCH_SECONDS = 0.0005
"""How long a thread that wants the interpreter's lock waits until it asks the one that has it. With Python's own 5 ms
the event loop waited so long each time that another thread was busy with Python (a template, an image, a parser)."""


class WorkerSpec(msgspec.Struct, frozen=True):
    """What a worker is told at its start."""

    config: ServerConfig
    folder: str
    """Of the sockets between workers and runner."""
    number: int = 0
    """By which the runner knows it. A worker that takes another one's place has a number of its own."""
    row: int = 0
    """In the memory for metrics."""
    process: int = 0
    """The first API process."""
    created: int = 0
    """When the server was started, seconds since 1970; what /v1/models says."""
    channel_fd: int = -1
    metrics_fd: int = -1

    def metrics_cells(self) -> SharedCells:
        return SharedCells(self.config.api_workers, Metrics.CELLS, self.metrics_fd)


class UnusableModel(Exception):
    """The model's files can't be used with this configuration. The message is for the operator."""


class Worker:
    """`start`, `load`, connections through `take`; then `give_up` if need be, and `stop`."""

    def __init__(self, spec: WorkerSpec, cells: SharedCells, certificate: Certificate | None = None) -> None:
        config = self._config = spec.config
        self._created = spec.created
        self.engine = EngineClient(
            Metrics(
                config.model_names[0],
                cells,
                spec.row,
                spec.process,
                as_vllm=config.vllm_metrics,
                prefix_caching=config.enable_prefix_caching,
            ),
            Path(spec.folder),
            spec.number,
            live_seconds=config.live_seconds,
            max_unaccepted_bytes=config.max_row_bytes // config.api_workers,
            timeouts=Timeouts(queue=config.queue_timeout, request=config.request_timeout),
        )
        self.lifecycle = Lifecycle(self.engine, ready_seconds=config.ready_seconds, live_seconds=config.live_seconds)
        self.is_importing = False
        """Whether the thread that imports the tokenizer's library is at it."""
        self._tracing = _tracing(config)
        self._app = create_app(config, self.engine, self.lifecycle, self._tracing)
        self._http = HttpServer(self._app, config.silent_seconds, certificate)

    def start(self) -> None:
        self.engine.start()
        self._http.start()

    async def load(self) -> None:
        """Wait for the model, then give the routes what they work with. Raises UnusableModel, and EngineFailed when the
        runner can't load the model."""
        importing = asyncio.create_task(asyncio.to_thread(self._import_transformers))
        model = await self.engine.wait_ready()
        try:
            await importing
            self._app.state.services = await asyncio.to_thread(self._services, model)
        except SoftPromptError as error:
            raise UnusableModel(str(error)) from error
        except Exception as error:  # Whatever a model's files make the libraries raise: it is about those files.
            logger.debug("traceback", exc_info=error)
            raise UnusableModel(f"the model's tokenizer or templates cannot be used: {error}") from error
        # What is there now stays: the collector need not walk through it again while it holds up every stream.
        gc.collect()
        gc.freeze()
        # A step of a few hundred streams makes more objects than the default threshold, and all of them go with it.
        gc.set_threshold(_COLLECT_AFTER_OBJECTS, 10, 10)

    def take(self, connection: socket.socket) -> bool:
        """Serve `connection`. Always possible."""
        return self._http.take(connection)

    async def give_up(self, message: str) -> None:
        """End every request with an error, and wait until their clients have been told, if that is soon."""
        self.engine.fail(message)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_SECONDS):
                await self.lifecycle.idle()

    async def stop(self) -> None:
        """Close the connections, then what the routes worked with."""
        await self._http.stop()
        services: Services | None = getattr(self._app.state, "services", None)
        if services is not None:
            services.grammars.close()
            if services.vision is not None:
                services.vision.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.flush)

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
        services = Services.load(
            self.engine,
            model,
            self.engine.responses,
            served_model_names=config.model_names,
            chat_template=config.chat_template,
            tool_call_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
            generation_config=config.generation_config,
            soft_prompts=config.soft_prompts,
            enable_prompt_embeds=config.enable_prompt_embeds,
            honour_priority=config.scheduling_policy == "priority",
            strict_params=config.strict_params,
            trust_request_template=config.trust_request_chat_template,
            max_json_bytes=config.json_limit_for(model.max_model_len),
            stored=self.engine.stored if config.stores_prompt_embeds else None,
            trust_remote_code=config.trust_remote_code,
            pooling=config.pooling,
            on_compiled=self.engine.metrics.grammar_compile_time.observe,
            allowed_media_domains=config.allowed_media_domains,
        )
        background = BackgroundTasks(self.lifecycle.enter, self.lifecycle.leave)
        return replace(services, created=self._created, background=background)


# --- as a process of its own ------------------------------------------------------------------------------------------


class _Further:
    """A worker beside the first. It lives as long as its channel is open, and does what it is told there."""

    def __init__(self, spec: WorkerSpec) -> None:
        files = spec.config.certificate_files
        self._worker = Worker(spec, spec.metrics_cells(), Certificate(files) if files else None)
        self._channel = Channel(socket.socket(fileno=spec.channel_fd))
        self._end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """What open requests are told, when it is time to go."""
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> int:
        worker = self._worker
        self._channel.listen(self._on_word, lambda: self._leave(SHUTTING_DOWN))
        worker.start()
        loading = asyncio.create_task(self._load())
        status = EXIT_OK
        try:
            ends: set[asyncio.Future[Any]] = {loading, self._end}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
                worker.lifecycle.loaded = True
                self._channel.tell("loaded")
                status = await self._last()
        except UnusableModel:
            status = EXIT_CONFIGURATION  # The first worker finds the same, and says it.
        except EngineFailed:
            status = await self._last()
        if status == EXIT_OK:
            await worker.give_up(await self._end)
        await worker.stop()
        return status

    async def _load(self) -> None:
        """Silently: what there is to say about the model's files, the first worker says."""
        ours = logging.getLogger("server")
        level = ours.level
        ours.setLevel(logging.ERROR)
        try:
            await self._worker.load()
        finally:
            ours.setLevel(level)

    async def _last(self) -> int:
        """Until it is time to go. What the runner tells all workers is followed by an order; a failure that this one
        alone has met is not, and another worker takes its place."""
        failed = asyncio.create_task(self._worker.engine.wait_failed())
        ends: set[asyncio.Future[Any]] = {failed, self._end}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            await asyncio.wait({self._end}, timeout=_ORDER_SECONDS)
        failed.cancel()
        return EXIT_OK if self._end.done() else EXIT_FAILED

    def _on_word(self, word: str, connection: socket.socket | None) -> None:
        if word == "take" and connection is not None:
            connection.setblocking(False)
            self._worker.take(connection)
        elif word == "drain":
            self._worker.lifecycle.draining = True
            self._tasks.append(asyncio.create_task(self._tell_when_idle()))
        elif word == "failed":
            self._leave(ENGINE_STOPPED)

    async def _tell_when_idle(self) -> None:
        await self._worker.lifecycle.idle()
        self._channel.tell("idle")

    def _leave(self, message: str) -> None:
        if not self._end.done():
            self._end.set_result(message)


def _tracing(config: ServerConfig) -> Tracing | None:
    if config.otlp_traces_endpoint is None:
        return None
    return Tracing.to(config.otlp_traces_endpoint, version=package_version(), host=config.host, port=config.port)


def leave(status: int) -> NoReturn:
    """End the process without waiting for its threads."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)


def configure_process(config: ServerConfig) -> None:
    """`log_level` is for what we log; libraries are only heard when something is wrong, or everything is wanted."""
    log_level, log_format = config.log_level, config.log_format
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(log_format))
    logging.basicConfig(handlers=[handler])
    logging.getLogger().setLevel(logging.DEBUG if log_level == "debug" else logging.WARNING)
    for ours in ("intarsia", "server"):
        logging.getLogger(ours).setLevel(log_level.upper())
    _raise_file_limit()
    sys.setswitchinterval(_SWITCH_SECONDS)
    keep_freed_memory()
    share_cores(config.api_workers)
    hash_rows(config.enable_prefix_caching)


def _raise_file_limit() -> None:
    """Each client takes a file descriptor, and 1,024, a common default, are soon used up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main() -> NoReturn:
    # Stopping is the first process's business: it drains.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=WorkerSpec)
    configure_process(spec.config)

    async def run() -> int:
        return await _Further(spec).run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        leave(loop.run(run()))


if __name__ == "__main__":
    main()
