"""The server's side of the conversation with the runner: requests out, tokens in.

Used by the routes through `generate`, by the probes (`model`, `last_heartbeat`, `failure`) and by the `worker`, which
starts it; `serve` stops it. Everything here runs on the event loop's thread. The sockets are watched with `add_reader`:
a step's output is one callback that decodes one message and appends to the inboxes of the requests in it, with no task
and no future of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import zmq

from runner.messages import (
    Abort,
    AbortAnswer,
    Aborted,
    Accepted,
    Failed,
    Generate,
    Heartbeat,
    Hello,
    Loading,
    LookUp,
    ModelInfo,
    Ready,
    Rejected,
    Reply,
    SamplingParams,
    Sharing,
    Stats,
    StepOutput,
    StoreAnswer,
    TokenRows,
    WorkerGone,
    decode_from_runner,
    encode,
)
from server.errors import (
    ENGINE_STOPPED,
    APIError,
    EngineFailed,
    InvalidRequest,
    QueueFull,
    RequestAborted,
    Unavailable,
    log_exception,
)
from server.generation import GenerationStream, Inbox
from server.look_ups import LookUps
from server.metrics import Metrics
from server.prompt import PromptRows
from server.questions import Questions, Replied
from server.request_context import current_client, current_request
from server.responses.store import ResponseStore
from server.row_memory import probe_memory
from server.stored_embeddings import NoSuchEmbedding, StoredEmbeddings
from server.timeouts import NO_TIMEOUTS, Timeouts

logger = logging.getLogger(__name__)

_HELLO_SECONDS = 0.2
_TICK_SECONDS = 0.5
_SEND_QUEUE = 1 << 16
"""Messages; far more than one HTTP request's prompts, which are sent without a pause."""
_MESSAGES_PER_CALLBACK = 64
"""After so many the loop gets a turn, however fast the runner is."""


class EngineClient:
    """One runner, as one API process sees it. `folder`: where their sockets are. `worker`: by which number the runner
    knows this process; no two ever have the same."""

    def __init__(
        self,
        metrics: Metrics,
        folder: Path,
        worker: int = 0,
        *,
        live_seconds: float = 60.0,
        max_unaccepted_bytes: int = 1 << 32,
        timeouts: Timeouts = NO_TIMEOUTS,
    ) -> None:
        self.metrics = metrics
        self.model: ModelInfo | None = None
        """Set once the runner is ready."""
        self.stage = ""
        """What the runner is doing while it loads."""
        self.failure: str | None = None
        """Set once the runner is gone: what open streams were, and new requests are, told (as EngineFailed)."""
        self.last_heartbeat = time.monotonic()
        self._live_seconds = live_seconds
        self._max_unaccepted_bytes = max_unaccepted_bytes
        self._unaccepted_bytes = 0
        self._timeouts = timeouts
        self.runner_address = f"ipc://{folder / 'runner'}"
        self._address = f"ipc://{folder / f'worker{worker}'}"
        self._worker = worker
        self._questions: Questions[Replied] = Questions(self._send, self._check_running)
        self._store_questions: Questions[StoreAnswer] = Questions(self._send, self._check_running)
        self.stored = StoredEmbeddings(worker, self._store_questions, max_unaccepted_bytes)
        self.responses = ResponseStore(worker, self._questions)
        self._shares = False
        """Whether the runner reads memory of this process."""
        self._probe = probe_memory()
        """For it to try; until it has answered."""
        self._requests: dict[int, Inbox] = {}
        self._look_ups = LookUps()
        self._ids = itertools.count(1)
        self._unsent: list[bytes] = []
        """Aborts and the like that found the socket full: the messages that must not be lost."""
        self._answered = False
        self._ready = asyncio.Event()
        self._failed = asyncio.Event()
        self._context = zmq.Context()
        self._to_runner = self._context.socket(zmq.PUSH)
        self._from_runner = self._context.socket(zmq.PULL)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ticker: asyncio.Task[None] | None = None

    @property
    def stats(self) -> Stats:
        """The runner's, from its last heartbeat."""
        return self.metrics.stats

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def start(self) -> None:
        """Begin to greet the runner, which may not be there yet."""
        self._loop = asyncio.get_running_loop()
        self._from_runner.setsockopt(zmq.RCVHWM, 0)
        self._from_runner.bind(self._address)
        # No queue before there is a connection: a request must not wait in it for a runner that never comes.
        self._to_runner.setsockopt(zmq.IMMEDIATE, 1)
        self._to_runner.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
        self._to_runner.setsockopt(zmq.RECONNECT_IVL, 20)
        self._to_runner.setsockopt(zmq.LINGER, 0)
        self._to_runner.connect(self.runner_address)
        self._loop.add_reader(self._from_runner.FD, self._on_readable)
        self._ticker = self._loop.create_task(self._tick())

    async def close(self) -> None:
        """Fail what is open and let go of the sockets."""
        self.fail("The server is shutting down.")
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        if self._loop is not None and not self._from_runner.closed:
            self._loop.remove_reader(self._from_runner.FD)
        self._context.destroy(linger=0)

    async def wait_ready(self) -> ModelInfo:
        """The model, once it is loaded. Raises APIError when the runner fails instead."""
        await self._ready.wait()
        if self.model is None or self.failure is not None:
            raise EngineFailed(self.failure)
        return self.model

    async def wait_failed(self) -> None:
        """Until `failure` is set."""
        await self._failed.wait()

    # --- requests -------------------------------------------------------------------------------------------------

    async def generate(
        self, prompt: PromptRows, sampling: SamplingParams, n: int = 1, cache_salt: str = "", priority: int = 0
    ) -> GenerationStream:
        """Queue a prompt with `n` choices; returns once the runner has accepted it.

        Raises QueueFull (429), InvalidRequest (400, the runner's last check), Unavailable and EngineFailed (503),
        RequestTimeout (504).
        Cancelling the caller aborts the request.
        """
        self._check_running()
        row_bytes = sum(memoryview(rows).nbytes for rows in prompt.rows)
        if self._unaccepted_bytes and self._unaccepted_bytes + row_bytes > self._max_unaccepted_bytes:
            self.metrics.count_rejected("rows_full")
            raise QueueFull("Too many prompt embeddings are waiting to be queued.")
        sent = prompt.sharing() if self._shares else prompt  # `prompt` holds the memory until it is accepted
        inbox = Inbox(next(self._ids), n, len(prompt), self.metrics, current_request.get(), sampling.max_tokens)
        message = Generate(
            self._worker, inbox.request, n, sampling, sent.spans, cache_salt, priority, client=current_client(),
            has_positions=prompt.positions is not None, has_hints=prompt.hint_ids is not None,
            answer=inbox.context.answer_id if inbox.context is not None else "",
        )  # fmt: skip
        self._requests[inbox.request] = inbox
        self._unaccepted_bytes += row_bytes
        stream = GenerationStream(self, inbox)
        if inbox.context is not None:
            inbox.context.on_end.append(stream.abort)
        self._timeouts.start(inbox, self._give_up)
        try:
            if not self._send(encode(message), *sent.frames):
                self._refuse(inbox, QueueFull("The engine is not taking requests fast enough."), "queue_full")
            while not inbox.accepted and inbox.error is None:
                await inbox.wait()
            if not inbox.accepted and inbox.error is not None:
                raise inbox.error
        except BaseException:
            stream.abort()
            raise
        finally:
            self._unaccepted_bytes -= row_bytes
        self.metrics.embedding_rows.add(sum(span.length for span in prompt.spans))
        self.metrics.embedding_bytes.add(row_bytes)
        return stream

    async def token_rows(self, token_ids: Sequence[int]) -> list[bytes]:
        """The model's own input rows of these ids (at least one): their bytes in the model's dtype, in pieces.

        Raises QueueFull (429), InvalidRequest (400), Unavailable and EngineFailed (503).
        """
        self._check_running()
        number = next(self._ids)
        async with self._look_ups.open(number, self._live_seconds) as answer:
            ids = np.array(token_ids, dtype=np.int32)
            if not self._send(encode(LookUp(self._worker, number, current_client())), ids.data):
                raise QueueFull("The engine is not taking requests fast enough.")
            return await answer

    async def abort_answer(self, answer_id: str) -> bool:
        """End an answer that is being made by this API process or by another: who reads it gets RequestAborted. False
        where the current request's API key has none by this id.

        Raises QueueFull (429), Unavailable and EngineFailed (503).
        """
        client = current_client()
        reply, _ = await self._questions.ask(lambda number: AbortAnswer(self._worker, number, client, answer_id))
        return not reply.problem

    def abort(self, inbox: Inbox, choice: int) -> None:
        """For the streams: tell the runner."""
        self._send_surely(encode(Abort(self._worker, inbox.request, choice)))

    def worker_gone(self, worker: int) -> None:
        """Tell the runner that another API process has died, so that it frees what that one was using."""
        self._send_surely(encode(WorkerGone(worker)))

    def forget(self, inbox: Inbox) -> None:
        """For the streams: the request is over. Counted here and nowhere else."""
        if self._requests.pop(inbox.request, None) is None:
            return
        inbox.cancel_timers()
        inbox.measure_end(time.monotonic())

    def fail(self, message: str) -> None:
        """The runner is gone, or about to go: end every open request with EngineFailed, and every later one."""
        if self.failure is not None:
            return
        self.failure = message
        for inbox in list(self._requests.values()):
            inbox.fail(EngineFailed(message))
            self.forget(inbox)
        self._look_ups.fail(EngineFailed(message))
        self._questions.fail(EngineFailed(message))
        self._store_questions.fail(EngineFailed(message))
        self._ready.set()
        self._failed.set()

    def _check_running(self) -> None:
        if self.failure is not None:
            raise EngineFailed(self.failure)
        if self.model is None:
            raise Unavailable("The model is still loading.")

    def _give_up(self, inbox: Inbox, error: APIError) -> None:
        """End a request that takes too long, wherever it is."""
        if inbox.open:
            self.abort(inbox, -1)
            inbox.fail(error)
            self.forget(inbox)

    def _refuse(self, inbox: Inbox, error: APIError, reason: str) -> None:
        """The request was never queued: it is not counted among those that ended."""
        inbox.cancel_timers()
        self.metrics.count_rejected(reason)
        self._requests.pop(inbox.request, None)
        inbox.fail(error)

    # --- sockets --------------------------------------------------------------------------------------------------

    def _send(self, *frames: bytes | memoryview) -> bool:
        """False where the runner's queue is full or nobody is connected. Never waits. Large frames are not copied."""
        try:
            self._to_runner.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def _send_surely(self, frame: bytes) -> None:
        """Now, or as soon as the runner takes messages again."""
        if self.failure is None and (self._unsent or not self._send(frame)):
            self._unsent.append(frame)

    async def _tick(self) -> None:
        """Greet the runner until it answers; then send what could not be sent and notice a silent runner."""
        while not self._answered:
            probe = None if self._probe is None else self._probe.told
            self._send(encode(Hello(self._worker, self._address, probe)))
            await asyncio.sleep(_HELLO_SECONDS)
        self._probe = None
        while True:
            due = time.monotonic() + 2 * _TICK_SECONDS
            await asyncio.sleep(_TICK_SECONDS)
            while self._unsent and self._send(self._unsent[0]):
                del self._unsent[0]
            now = time.monotonic()
            # A tick that comes late was held up by this process, and heartbeats may be waiting to be read.
            if self.model is not None and now < due and now - self.last_heartbeat > self._live_seconds:
                for inbox in [each for each in self._requests.values() if not each.accepted]:
                    self.abort(inbox, -1)  # It may have the message, and come back.
                    self._refuse(inbox, Unavailable("The engine does not answer."), "unavailable")

    def _on_readable(self) -> None:
        """The socket's descriptor signals only changes, so it has to be read until it is empty."""
        for _ in range(_MESSAGES_PER_CALLBACK):
            try:
                frame = self._from_runner.recv(zmq.NOBLOCK)
            except zmq.ZMQError:
                return  # Empty, or closed.
            try:
                self._on_message(frame)
            except (msgspec.DecodeError, IndexError) as error:
                # The two processes do not speak the same language; nothing that follows can be trusted.
                logger.error("the runner sent a message that makes no sense (%s)", type(error).__name__)
                self.fail(ENGINE_STOPPED)
            except Exception as error:  # a fault of ours, and part of a step may be lost: nobody is to wait for it
                log_exception(error)
                self.fail(ENGINE_STOPPED)
        if self._loop is not None:
            self._loop.call_soon(self._on_readable)

    def _on_message(self, frame: bytes) -> None:
        message = decode_from_runner(frame)
        if isinstance(message, StepOutput):
            self._on_step(message)
        elif isinstance(message, Heartbeat):
            self.last_heartbeat = time.monotonic()
            self.metrics.stats = message.stats
        elif isinstance(message, Accepted):
            inbox = self._requests.get(message.request)
            if inbox is not None:
                inbox.accept()
        elif isinstance(message, TokenRows):
            self._look_ups.add(message)
        elif isinstance(message, Rejected):
            self._on_rejected(message)
        elif isinstance(message, StoreAnswer):
            if message.problem == "rate_limit":
                self.metrics.count_rejected(message.problem)
            self._store_questions.on_answer(message.request, message)
        elif isinstance(message, Reply):
            self._questions.on_answer(message.request, (message, self._rest()))
        elif isinstance(message, Aborted):
            inbox = self._requests.get(message.request)
            if inbox is not None:
                inbox.fail(RequestAborted(), "abort")
                self.forget(inbox)
        elif isinstance(message, Ready):
            self._answered = True
            self.model = self.metrics.model = message.model
            self.last_heartbeat = time.monotonic()
            self._ready.set()
        elif isinstance(message, Sharing):
            self._shares = self.stored.shares = True
        elif isinstance(message, Loading):
            self._answered = True
            if message.stage != self.stage:  # Each greeting is answered.
                self.stage = message.stage
                if self._worker == 0:  # All of them are told.
                    logger.info("loading: %s", message.stage)
        else:
            self._on_failed(message)

    def _rest(self) -> list[memoryview]:
        """The frames behind the one that was read last: they have arrived together."""
        frames = self._from_runner.recv_multipart(copy=False) if self._from_runner.rcvmore else []
        return [frame.buffer for frame in frames]

    def _on_failed(self, message: Failed) -> None:
        if self.model is not None:  # else the runner itself says why it cannot load
            logger.error("the engine failed: %s", message.message)
        self.fail(ENGINE_STOPPED)

    def _on_rejected(self, message: Rejected) -> None:
        inbox = self._requests.get(message.request)
        wait = max(1, math.ceil(message.retry_after))
        error: APIError = QueueFull(message.message, retry_after=wait)
        if message.reason == "invalid":
            error = InvalidRequest(message.message)
        elif message.reason == "not_found":  # it was there when the prompt was made
            error = NoSuchEmbedding("prompt")
        if inbox is not None:
            self._refuse(inbox, error, message.reason)
        elif self._look_ups.reject(message.request, error):
            self.metrics.count_rejected(message.reason)

    def _on_step(self, step: StepOutput) -> None:
        """Hand out one step's output. Runs once per step, its loop once per token: keep it short."""
        now = time.monotonic()
        requests = self._requests
        for started in step.started:
            if (inbox := requests.get(started.request)) is not None:
                inbox.add_started(started)
        for entries in step.prompt_logprobs:
            if (inbox := requests.get(entries.request)) is not None:
                inbox.add_prompt_logprobs(entries)
        for rows in step.hidden:
            if (inbox := requests.get(rows.request)) is not None:
                inbox.add_hidden(rows)
        for end in step.ends:
            if (inbox := requests.get(end.request)) is not None:
                inbox.direct = None  # What the last token is, its end says.
        logprobs = step.logprobs or itertools.repeat(None)
        before: list[float] = []
        for request, choice, token, entry in zip(step.requests, step.choices, step.tokens, logprobs, strict=False):
            inbox = requests.get(request)
            if inbox is not None and not inbox.ended[choice]:
                before.append(inbox.add_token(choice, token, entry, now))
        self._measure_tokens(before, now)
        for end in step.ends:
            if (inbox := requests.get(end.request)) is not None:
                inbox.add_end(end)
                if not inbox.open:
                    self.forget(inbox)

    def _measure_tokens(self, before: Sequence[float], now: float) -> None:
        """`before`: for each token, when the one before it came. Most of a step's had theirs in the same step."""
        self.metrics.generation_tokens.add(len(before))
        for last, times in Counter(before).items():
            if last:
                self.metrics.inter_token_latency.observe(now - last, times)
