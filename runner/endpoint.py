"""Where workers' messages come in and the engine's go out. One per runner.

A thread of its own receives, checks and admits, so that a full queue or a bad request is answered at once, however long
the engine's step takes; what it accepts waits in an inbox for the engine's loop. Sending is done by either thread,
under a lock (a ZeroMQ socket may change threads behind a full memory barrier, which a lock is).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import TYPE_CHECKING

import msgspec
import zmq

from runner.config import RunnerConfig
from runner.messages import (
    Abort,
    Accepted,
    Failed,
    FromRunner,
    Generate,
    Heartbeat,
    Hello,
    Loading,
    Ready,
    Rejected,
    RejectReason,
    StepOutput,
    WorkerGone,
    decode_to_runner,
    encode,
)
from runner.sequence import InvalidRequest, Request

if TYPE_CHECKING:
    # The engine brings torch, which takes seconds to import: workers are greeted meanwhile.
    from runner.engine import Engine

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.25
_SEND_QUEUE = 100_000
"""Messages that may wait for a worker before it counts as gone."""


Command = Request | Abort | WorkerGone


class Endpoint:
    def __init__(self, config: RunnerConfig) -> None:
        self._config = config
        self._context = zmq.Context()
        self._in = self._context.socket(zmq.PULL)
        self._in.setsockopt(zmq.RCVHWM, 0)
        self._in.bind(config.address)
        self._out: dict[int, zmq.Socket[bytes]] = {}
        self._gone: set[int] = set()
        """Workers of which nothing is taken any more: what one has sent may come after the news of its death."""
        self._lock = threading.Lock()
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._engine: Engine | None = None
        self._status: Loading | Ready | Failed = Loading("starting")
        self._accepted_sequences = 0
        self._accepted_row_bytes = 0
        self._last_heartbeat = 0.0
        threading.Thread(target=self._receive, name="endpoint", daemon=True).start()

    # --- the engine's side ------------------------------------------------------------------------------------------

    def set_stage(self, stage: str) -> None:
        self._set_status(Loading(stage))

    def set_ready(self, engine: Engine) -> None:
        self._engine = engine
        self._set_status(Ready(engine.info))

    def set_failed(self, message: str) -> None:
        self._set_status(Failed(message))

    def close(self) -> None:
        """Gives what was sent a second to arrive."""
        with self._lock:
            for socket in self._out.values():
                socket.close(linger=1000)
            self._out.clear()

    def emit(self, worker: int, output: StepOutput) -> None:
        self._send(worker, output)

    def run_engine(self, engine: Engine) -> None:
        """The engine's loop; does not return."""
        while True:
            wait = 0.0 if engine.has_work else HEARTBEAT_SECONDS
            while (command := self._next_command(wait)) is not None:
                self._apply(engine, command)
                wait = 0.0
            if engine.has_work:
                engine.step()
            now = time.monotonic()
            if now - self._last_heartbeat >= HEARTBEAT_SECONDS:
                self._last_heartbeat = now
                self._broadcast(Heartbeat(engine.stats()))

    def _next_command(self, wait: float) -> Command | None:
        try:
            return self._inbox.get(timeout=wait) if wait else self._inbox.get_nowait()
        except queue.Empty:
            return None

    @staticmethod
    def _apply(engine: Engine, command: Command) -> None:
        if isinstance(command, Request):
            engine.add(command)
        elif isinstance(command, Abort):
            engine.abort((command.worker, command.request), command.choice)
        else:
            engine.abort_worker(command.worker)

    # --- the receiving thread ---------------------------------------------------------------------------------------

    def _receive(self) -> None:
        while True:
            frames = self._in.recv_multipart(copy=False)
            try:
                message = decode_to_runner(frames[0].buffer)
            except msgspec.MsgspecError:
                log.error("dropped a message of %d bytes that can't be decoded", len(frames[0].buffer))
                continue
            if isinstance(message, Hello):
                self._greet(message)
            elif isinstance(message, Abort):
                self._inbox.put(message)
            elif isinstance(message, WorkerGone):
                with self._lock:
                    self._forget(message.worker)
            elif message.worker not in self._gone:
                self._admit(message, [frame.buffer for frame in frames[1:]])

    def _greet(self, hello: Hello) -> None:
        with self._lock:
            if hello.worker not in self._out and hello.worker not in self._gone:
                socket: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
                socket.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
                socket.connect(hello.address)
                self._out[hello.worker] = socket
        self._send(hello.worker, self._status)

    def _admit(self, message: Generate, frames: list[memoryview]) -> None:
        engine, config = self._engine, self._config
        if engine is None:
            return self._reject(message, "queue_full", "The model is still loading.")
        info = engine.info
        try:
            request = Request.from_message(
                message,
                frames,
                vocab_size=info.vocab_size,
                row_size=info.hidden_size * engine.model.dtype.itemsize,
                max_model_len=info.max_model_len,
                block_size=info.block_size,
                private_cache=not config.enable_prefix_caching,
            )
        except InvalidRequest as error:
            return self._reject(message, "invalid", str(error))
        # Both sides only grow, each written by one thread: no lock, and never too small a difference.
        unfinished = self._accepted_sequences - engine.ended_sequences
        if unfinished >= info.max_num_seqs + config.max_queue:
            return self._reject(message, "queue_full", "The server's queue is full.")
        row_bytes = self._accepted_row_bytes - engine.released_row_bytes
        if request.row_bytes and row_bytes + request.row_bytes > config.max_row_bytes:
            return self._reject(message, "rows_full", "The server's memory for prompt embeddings is full.")
        self._accepted_sequences += request.n
        self._accepted_row_bytes += request.row_bytes
        self._send(message.worker, Accepted(message.request))
        self._inbox.put(request)

    def _reject(self, message: Generate, reason: RejectReason, text: str) -> None:
        self._send(message.worker, Rejected(message.request, reason, text))

    # --- sending ----------------------------------------------------------------------------------------------------

    def _set_status(self, status: Loading | Ready | Failed) -> None:
        self._status = status
        self._broadcast(status)

    def _broadcast(self, message: FromRunner) -> None:
        for worker in list(self._out):
            self._send(worker, message)

    def _send(self, worker: int, message: FromRunner) -> None:
        data = encode(message)
        with self._lock:
            socket = self._out.get(worker)
            if socket is None:
                return
            try:
                socket.send(data, zmq.NOBLOCK)
            except zmq.Again:
                log.error("worker %d takes no messages: forgetting it", worker)
                self._forget(worker)

    def _forget(self, worker: int) -> None:
        """Free what a worker was using. The lock is held."""
        socket = self._out.pop(worker, None)
        if socket is not None:
            socket.close(linger=0)
        self._gone.add(worker)
        self._inbox.put(WorkerGone(worker))
