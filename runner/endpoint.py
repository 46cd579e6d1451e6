"""Where workers' messages come in and the engine's go out. One per runner.

A thread of its own receives, checks and admits, so that a full queue or a bad request is answered at once, however long
the engine's step takes; what it accepts waits in an inbox for the engine's loop. A request with a grammar goes by way
of a pool that compiles it. Sending is done by any of these threads, under a lock (a ZeroMQ socket may change threads
behind a full memory barrier, which a lock is).
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import zmq

from runner.admission import Admission, Refusal
from runner.config import RunnerConfig
from runner.embedding_store import EmbeddingStore, NotStored, StoredRows
from runner.messages import (
    DIGEST_BYTES,
    Abort,
    AbortAnswer,
    Aborted,
    Accepted,
    Failed,
    FromRunner,
    Generate,
    Heartbeat,
    Hello,
    Loading,
    LookUp,
    PutRows,
    Ready,
    Rejected,
    RejectReason,
    Reply,
    Sharing,
    Stats,
    StepOutput,
    StoreAnswer,
    ToRecords,
    ToStore,
    WorkerGone,
    decode_to_runner,
    encode,
)
from runner.record_messages import answer as answer_about_records
from runner.record_store import Data, RecordStore
from runner.running_answers import RunningAnswers
from runner.sequence import InvalidRequest, Key, Request
from runner.shared_rows import RowsGone, can_share, map_rows, with_shared
from runner.store_messages import answer

if TYPE_CHECKING:
    # The engine brings torch, which takes seconds to import: workers are greeted meanwhile.
    from runner.engine import Engine
    from runner.grammar import GrammarCompiler
    from runner.token_table import TokenTable

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.25
_SEND_QUEUE = 100_000
"""Messages that may wait for a worker before it counts as gone."""
_COMPILING_THREADS = 2


@dataclass(frozen=True)
class Refused:
    """Accepted by its numbers, but not to run: its grammar is no good, or nobody waits for it any more."""

    request: Request


Command = Request | Abort | WorkerGone | Refused


class Endpoint:
    def __init__(self, config: RunnerConfig, on_fault: Callable[[str], None] = lambda reason: None) -> None:
        """`on_fault`: called in a thread of the endpoint's that has met a fault of ours and takes nothing in any more;
        whoever started the runner has to end it, for nobody would notice otherwise."""
        self._config = config
        self._on_fault = on_fault
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
        self._status_lock = threading.Lock()
        """Held until a status is sent, lest it arrive behind the next one. Taken before `_lock`."""
        self._admission = Admission(config)
        self._last_heartbeat = 0.0
        self._store = EmbeddingStore(config.max_stored_bytes, config.max_stored_bytes_per_key, config.stored_seconds)
        self._records = RecordStore()
        self._answers = RunningAnswers()
        self._grammars: GrammarCompiler | None = None
        self._table: TokenTable | None = None
        self._pool = ThreadPoolExecutor(_COMPILING_THREADS, thread_name_prefix="grammar")
        self._compiling: dict[Key, list[Abort]] = {}
        """Requests whose grammar is being compiled, and what has come after them."""
        self._compiling_lock = threading.Lock()
        threading.Thread(target=self._receive, name="endpoint", daemon=True).start()

    # --- the engine's side ------------------------------------------------------------------------------------------

    def set_stage(self, stage: str) -> None:
        self._set_status(Loading(stage))

    def set_ready(self, engine: Engine) -> None:
        from runner.grammar import GrammarCompiler
        from runner.token_table import TokenTable

        info, trusted = engine.info, self._config.trust_remote_code
        self._grammars = GrammarCompiler(info.path, info.vocab_size, trust_remote_code=trusted)
        self._table = TokenTable(engine.model, info.max_model_len, self._send, len(self._config.clients))
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
                self._store.expire()
                self._broadcast(Heartbeat(self._stats(engine)))

    def _stats(self, engine: Engine) -> Stats:
        store = self._store
        return msgspec.structs.replace(engine.stats(), stored_embeddings=len(store), stored_bytes=store.size)

    def _next_command(self, wait: float) -> Command | None:
        if not wait and self._inbox.empty():  # as in most steps
            return None
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
        elif isinstance(command, Refused):
            engine.refuse(command.request)
        else:
            engine.abort_worker(command.worker)

    # --- the receiving thread ---------------------------------------------------------------------------------------

    def _receive(self) -> None:
        try:
            self._receive_all()
        except Exception as error:
            self._die("receiving", error)

    def _die(self, work: str, error: Exception) -> None:
        """The stack is logged, but not the exception's own text: it may quote a prompt."""
        name = type(error).__name__
        log.error("the %s thread died: %s\n%s", work, name, "".join(traceback.format_tb(error.__traceback__, -30)))
        self._on_fault(f"its {work} thread died: {name}")

    def _receive_all(self) -> None:
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
                self._abort(message)
            elif isinstance(message, WorkerGone):
                self._records.end_worker(message.worker)
                with self._lock:
                    self._forget(message.worker)
            elif isinstance(message, LookUp):
                self._look_up(message, [frame.buffer for frame in frames[1:]])
            elif message.worker not in self._gone:
                buffers = [frame.buffer for frame in frames[1:]]
                if isinstance(message, Generate):
                    self._admit(message, buffers)
                elif isinstance(message, AbortAnswer):
                    self._abort_answer(message)
                elif isinstance(message, ToRecords):
                    reply, found = answer_about_records(self._records, message, buffers)
                    self._send(message.worker, reply, found)
                else:
                    self._ask_store(message, buffers)

    def _greet(self, hello: Hello) -> None:
        with self._lock:
            if hello.worker not in self._out and hello.worker not in self._gone:
                socket: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
                socket.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
                socket.connect(hello.address)
                self._out[hello.worker] = socket
        if can_share(hello.shared):
            self._send(hello.worker, Sharing())
        with self._status_lock:
            self._send(hello.worker, self._status)

    def _admit(self, message: Generate, frames: list[memoryview]) -> None:
        engine = self._engine
        if engine is None:
            return self._reject(message, "queue_full", "The model is still loading.")
        try:
            frames = with_shared(message.spans, frames, engine.info.hidden_size * engine.model.dtype.itemsize)
        except RowsGone:
            # Nobody waits, where the worker has let go of them; else it is our own want of room.
            return self._reject(message, "rows_full", "The rows of the prompt could not be read.", 1.0)
        try:
            stored = self._store.lease(span.stored for span in message.spans if span.stored)
        except NotStored:
            return self._reject(message, "not_found", "A stored embedding that the prompt names is gone.")
        refusal = self._queue(message, frames, engine, stored)
        if refusal is not None:
            self._store.give_back(stored)
            self._reject(message, refusal.reason, refusal.message, refusal.retry_after)

    def _queue(
        self, message: Generate, frames: list[memoryview], engine: Engine, stored: tuple[StoredRows, ...]
    ) -> Refusal | None:
        """Why the request is not to run, or nothing."""
        info, config = engine.info, self._config
        try:
            request = Request.from_message(
                message,
                frames,
                vocab_size=info.vocab_size,
                row_size=info.hidden_size * engine.model.dtype.itemsize,
                max_model_len=info.max_model_len,
                block_size=info.block_size,
                private_cache=not config.enable_prefix_caching,
                vision=info.vision,
                stored=stored,
            )
        except InvalidRequest as error:
            return Refusal("invalid", str(error))
        refusal = self._admission.refusal(request, engine, info.max_num_seqs)
        if refusal is not None:
            return refusal
        self._admission.accept(request)
        self._answers.add(message.answer, message.client, request.key)
        request.on_release = functools.partial(self._release, message.answer, request.key, stored)
        if request.sampling.grammar:
            self._compiling[request.key] = []
            self._pool.submit(self._compile, request)
        else:
            self._send(message.worker, Accepted(message.request))
            self._inbox.put(request)
        return None

    def _release(self, answer: str, request: Key, stored: tuple[StoredRows, ...]) -> None:
        """Called on the engine's thread."""
        self._answers.remove(answer, request)
        self._store.give_back(stored)

    def _ask_store(self, message: ToStore, frames: list[memoryview]) -> None:
        if self._engine is None:
            return
        if isinstance(message, PutRows):
            # Its rows are tokens once a prompt has them.
            refusal = self._admission.charge(message.owner, 0, self._engine)
            if refusal is not None:
                problem = StoreAnswer(message.request, (), False, "rate_limit", refusal.message, refusal.retry_after)
                return self._send(message.worker, problem)
        row_size = self._engine.info.hidden_size * self._engine.model.dtype.itemsize
        if isinstance(message, PutRows) and message.shared is not None and frames:
            try:
                rows = frames[0].nbytes // DIGEST_BYTES
                frames = [frames[0], map_rows(message.shared, rows * row_size)]
            except RowsGone:
                return self._send(message.worker, StoreAnswer(message.request, problem="full"))
        self._send(message.worker, answer(self._store, message, frames, row_size))

    def _look_up(self, message: LookUp, frames: list[memoryview]) -> None:
        if self._table is None or self._engine is None:
            return self._reject(message, "queue_full", "The model is still loading.")
        rows = sum(frame.nbytes for frame in frames) // 4
        refusal = self._admission.charge(message.client, rows, self._engine)
        if refusal is not None:
            return self._reject(message, refusal.reason, refusal.message, refusal.retry_after)
        self._table.look_up(message, frames)

    def _abort(self, message: Abort) -> None:
        with self._compiling_lock:
            # An abort must not overtake its request.
            waiting = self._compiling.get((message.worker, message.request))
            if waiting is None:
                self._inbox.put(message)
            else:
                waiting.append(message)

    def _abort_answer(self, message: AbortAnswer) -> None:
        requests = self._answers.find(message.answer, message.client)
        for worker, request in requests:
            self._abort(Abort(worker, request))
            self._send(worker, Aborted(request))
        self._send(message.worker, Reply(message.request, "" if requests else "not_found"))

    def _reject(self, message: Generate | LookUp, reason: RejectReason, text: str, retry_after: float = 0.0) -> None:
        self._send(message.worker, Rejected(message.request, reason, text, retry_after))

    # --- the compiling threads --------------------------------------------------------------------------------------

    def _compile(self, request: Request) -> None:
        try:
            self._pass_on(request)
        except Exception as error:
            self._die("grammar", error)

    def _pass_on(self, request: Request) -> None:
        """Gives the request its matchers and passes it on to the engine, or refuses it."""
        worker, number = request.key
        problem = self._add_matchers(request)
        with self._compiling_lock, self._lock:
            # Under both locks: what is heard of the worker or of the request from now on comes behind it.
            aborts = self._compiling.pop(request.key)
            gone = worker not in self._out or any(abort.choice == -1 for abort in aborts)
            commands: list[Command] = [Refused(request)] if gone or problem else [request, *aborts]
            for command in commands:
                self._inbox.put(command)
        if problem:
            self._send(worker, Rejected(number, "invalid", problem))
        elif not gone:
            self._send(worker, Accepted(number))

    def _add_matchers(self, request: Request) -> str:
        """What is wrong, or nothing."""
        from runner.grammar import GrammarError

        if self._compiling[request.key] or self._grammars is None:
            return "The request was aborted."  # not worth compiling
        try:
            request.matchers = self._grammars.compile(request.sampling.grammar, request.n)
        except GrammarError as error:
            return str(error)
        except Exception as error:  # the library's own; nothing of the grammar may reach the log
            log.error("compiling a grammar failed: %s", type(error).__name__)
            return "The grammar cannot be used."
        return ""

    # --- sending ----------------------------------------------------------------------------------------------------

    def _set_status(self, status: Loading | Ready | Failed) -> None:
        with self._status_lock:
            self._status = status
            self._broadcast(status)

    def _broadcast(self, message: FromRunner) -> None:
        for worker in list(self._out):
            self._send(worker, message)

    def _send(self, worker: int, message: FromRunner, frames: Sequence[Data] = ()) -> None:
        data = encode(message)
        with self._lock:
            socket = self._out.get(worker)
            if socket is None:
                return
            try:
                if frames:  # Large ones are not copied.
                    socket.send_multipart([data, *frames], zmq.NOBLOCK, copy=False)
                else:
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
