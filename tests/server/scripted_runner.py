"""A runner without a model, for tests of the server: it speaks the message contract and does what its script says.

    python -m tests.server.scripted_runner SCRIPT_JSON RUNNER_CONFIG_JSON

It echoes: token i of choice c is the prompt's id number (i + c) modulo its length (an embedding row counts as id 1).
Embeddings and responses are stored as the real one does it. Tests that need it to misbehave send it signals: SIGKILL to
die, SIGSTOP to freeze, SIGUSR1 to go on taking requests while its engine hangs, SIGUSR2 to report a failure and exit.

Tests that need something to be still running tell it when to go on, however slow they are: with HOLD it makes no step
(and is well otherwise, unlike one that hangs) until HOLD comes again, with NUDGE one step, or it has loaded.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import IO, Any

import numpy as np
import zmq

from runner.config import RunnerConfig
from runner.embedding_store import EmbeddingStore
from runner.messages import (
    DIGEST_BYTES,
    EMBEDDING_ID,
    Abort,
    AbortAnswer,
    Aborted,
    Accepted,
    End,
    Failed,
    FinishReason,
    FromRunner,
    Generate,
    Heartbeat,
    Hello,
    Loading,
    LookUp,
    ModelInfo,
    PromptLogprobs,
    PutRows,
    Ready,
    Rejected,
    RejectReason,
    Reply,
    Sharing,
    Started,
    Stats,
    StepOutput,
    TokenLogprobs,
    TokenRows,
    ToRecords,
    ToStore,
    WorkerGone,
    decode_to_runner,
    encode,
)
from runner.record_messages import answer as answer_about_records
from runner.record_store import RecordStore
from runner.shared_rows import can_share, map_rows, with_shared
from runner.store_messages import answer

HEARTBEAT_SECONDS = 0.1
HOLD, NUDGE = signal.SIGRTMIN, signal.SIGRTMIN + 1
REJECTED: dict[int, RejectReason] = {13: "queue_full", 14: "rows_full", 15: "invalid"}
"""Prompts that begin with these ids are rejected."""


@dataclass(frozen=True)
class Script:
    model: str
    """The folder whose config.json and tokenizer it pretends to serve."""
    log: str = os.devnull
    """A JSON line is written here for its start, for each message that it gets and for each choice that it ends."""
    load_seconds: float = 0.0
    """Or until NUDGE comes."""
    step_seconds: float = 0.001
    fail_loading: str = ""
    """Not empty: loading fails with this message and exit status 3."""
    linger: bool = False
    """Ignore end-of-file on standard input, as a runner that hangs would."""
    max_model_len: int = 512
    dtype: str = "float32"
    shares: bool = True
    """Whether it reads the workers' memory."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass
class Choice:
    request: int
    choice: int
    ids: list[int]
    generate: Generate
    done: int = 0


class ScriptedRunner:
    def __init__(self, script: Script, config: RunnerConfig) -> None:
        self.script = script
        self.log: IO[str] = open(script.log, "a", buffering=1)  # noqa: SIM115 - lives as long as the process
        self.context = zmq.Context()
        self.inbox = self.context.socket(zmq.PULL)
        self.inbox.bind(config.address)
        self.workers: dict[int, zmq.Socket[bytes]] = {}
        self.store = EmbeddingStore(config.max_stored_bytes, config.max_stored_bytes_per_key, config.stored_seconds)
        self.records = RecordStore()
        self.choices: list[Choice] = []
        self.waiting: dict[int, list[Started]] = {}
        self.hanging = False
        self.failing = False
        self.held = False
        self.nudged = False
        self.steps = 0

    def write(self, kind: str, **values: Any) -> None:
        self.log.write(json.dumps({"kind": kind, **values}) + "\n")

    def send(self, message: FromRunner, worker: int | None = None) -> None:
        """To all workers where none is named."""
        for number, socket in self.workers.items():
            if worker in (None, number):
                socket.send(encode(message))

    def run(self) -> int:
        self.write("start", pid=os.getpid(), parent=os.getppid())
        loaded_at = time.monotonic() + self.script.load_seconds
        ready = False
        beat = step = 0.0
        while True:
            self.inbox.poll(1 if self.choices else 20)
            while self.inbox.poll(0):
                self.on_message(self.inbox.recv_multipart(), ready)
            now = time.monotonic()
            if self.failing:
                self.send(Failed("the scripted engine failed"))
                time.sleep(0.1)
                return 1
            if not ready:
                if not self.workers or (now < loaded_at and not self.nudged):
                    continue
                self.nudged = False
                if self.script.fail_loading:
                    self.send(Failed(self.script.fail_loading))
                    print(f"runner: {self.script.fail_loading}", file=sys.stderr)
                    time.sleep(0.1)
                    return 3
                ready = True
                self.send(Ready(self.model_info()))
            if self.hanging:
                continue
            if now - beat >= HEARTBEAT_SECONDS:
                beat = now
                self.send(Heartbeat(Stats(running=len(self.choices), steps=self.steps, blocks_total=64)))
            may_step = self.nudged if self.held else now - step >= self.script.step_seconds
            if self.choices and may_step:
                step = now
                self.step()
                if self.held:
                    self.nudged = False
                    self.write("nudged")

    def on_message(self, frames: list[bytes], ready: bool) -> None:
        message = decode_to_runner(frames[0])
        if isinstance(message, Hello):
            if message.worker not in self.workers:
                self.workers[message.worker] = self.context.socket(zmq.PUSH)
                self.workers[message.worker].connect(message.address)
            if self.script.shares and can_share(message.shared):
                self.send(Sharing(), message.worker)
            self.send(Ready(self.model_info()) if ready else Loading("scripted"), message.worker)
        elif isinstance(message, Generate):
            rows = with_shared(message.spans, [memoryview(frame) for frame in frames[1:]], self.row_size)
            sizes = [frame.nbytes for frame in rows]
            shared = sum(sizes) - sum(len(frame) for frame in frames[1:])
            about = {"worker": message.worker, "request": message.request, "n": message.n}
            self.write("generate", **about, frames=sizes, shared=shared)
            self.on_generate(message, np.frombuffer(frames[1], dtype=np.int32))
        elif isinstance(message, Abort):
            self.write("abort", request=message.request, choice=message.choice, running=len(self.choices))
            self.drop(message)
        elif isinstance(message, AbortAnswer):
            self.abort_answer(message)
        elif isinstance(message, LookUp):
            self.on_look_up(message, np.frombuffer(frames[1], dtype=np.int32))
        elif isinstance(message, WorkerGone):
            running = [each for each in self.choices if each.generate.worker == message.worker]
            self.write("gone", worker=message.worker, running=len(running))
            self.choices = [each for each in self.choices if each not in running]
            self.workers.pop(message.worker).close(linger=0)
            self.records.end_worker(message.worker)
        elif isinstance(message, ToStore):
            rows = [memoryview(frame) for frame in frames[1:]]
            if isinstance(message, PutRows) and message.shared is not None:
                rows[1] = map_rows(message.shared, rows[0].nbytes // DIGEST_BYTES * self.row_size)
            about_rows = answer(self.store, message, rows, self.row_size)
            self.write("stored", worker=message.worker, entries=len(self.store))  # before who reads it is told to go on
            self.send(about_rows, message.worker)
        elif isinstance(message, ToRecords):
            reply, found = answer_about_records(self.records, message, [memoryview(frame) for frame in frames[1:]])
            self.write("record", worker=message.worker, question=type(message).__name__)
            self.workers[message.worker].send_multipart([encode(reply), *found])

    @cached_property
    def row_size(self) -> int:
        return (4 if self.script.dtype == "float32" else 2) * self.model_info().hidden_size

    def drop(self, message: Abort) -> None:
        self.choices = [
            each
            for each in self.choices
            if (each.generate.worker, each.request) != (message.worker, message.request)
            or message.choice not in (-1, each.choice)
        ]

    def abort_answer(self, message: AbortAnswer) -> None:
        wanted = (message.answer, message.client)
        found = {
            (each.generate.worker, each.request)
            for each in self.choices
            if (each.generate.answer, each.generate.client) == wanted
        }
        for worker, request in found:
            self.drop(Abort(worker, request))
            self.send(Aborted(request), worker)
        self.write("abort_answer", worker=message.worker, found=sorted(found))
        self.send(Reply(message.request, "" if found else "not_found"), message.worker)

    def on_generate(self, message: Generate, token_ids: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        if (reason := REJECTED.get(int(token_ids[0]))) is not None:
            self.send(Rejected(message.request, reason, "The script says no."), message.worker)
            return
        self.send(Accepted(message.request), message.worker)
        ids = [1 if token == EMBEDDING_ID else int(token) for token in token_ids]
        for choice in range(message.n):
            self.choices.append(Choice(message.request, choice, ids, message))
            self.waiting.setdefault(message.worker, []).append(Started(message.request, choice, 0, 0.001))

    def on_look_up(self, message: LookUp, token_ids: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        """Every value of an id's row is the id; in two parts."""
        if (reason := REJECTED.get(int(token_ids[0]))) is not None:
            self.send(Rejected(message.request, reason, "The script says no."), message.worker)
            return
        rows = np.repeat(token_ids.astype(np.float32)[:, None], self.model_info().hidden_size, 1)
        self.send(TokenRows(message.request, rows[:1].tobytes(), False), message.worker)
        self.send(TokenRows(message.request, rows[1:].tobytes(), True), message.worker)

    def step(self) -> None:
        self.steps += 1
        for worker in {each.generate.worker for each in self.choices}:
            self.send(self.output(worker), worker)

    def output(self, worker: int) -> StepOutput:
        output = StepOutput([], [], [], started=self.waiting.pop(worker, []))
        logprobs: list[TokenLogprobs | None] = []
        for each in [each for each in self.choices if each.generate.worker == worker]:
            sampling = each.generate.sampling
            if each.done == 0 and each.choice == 0 and sampling.prompt_logprobs is not None:
                entries = tuple(_logprobs(token, sampling.prompt_logprobs) for token in each.ids[1:])
                output.prompt_logprobs.append(PromptLogprobs(each.request, 1, entries))
            if sampling.max_tokens:
                token = each.ids[(each.done + each.choice) % len(each.ids)]
                each.done += 1
                output.requests.append(each.request)
                output.choices.append(each.choice)
                output.tokens.append(token)
                logprobs.append(None if sampling.logprobs is None else _logprobs(token, sampling.logprobs))
                if token in sampling.stop_token_ids and each.done >= sampling.min_tokens:
                    self.end(each, output, "stop", token)
                    continue
            if each.done >= sampling.max_tokens:
                self.end(each, output, "length")
        if any(logprobs):
            output.logprobs.extend(logprobs)
        return output

    def end(self, choice: Choice, output: StepOutput, reason: FinishReason, token: int | None = None) -> None:
        output.ends.append(End(choice.request, choice.choice, reason, token))
        self.choices.remove(choice)
        self.write("end", request=choice.request, choice=choice.choice)

    def model_info(self) -> ModelInfo:
        config = json.loads((Path(self.script.model) / "config.json").read_text())
        return ModelInfo(
            path=self.script.model,
            model_type=config["model_type"],
            dtype=self.script.dtype,
            hidden_size=config["hidden_size"],
            vocab_size=config["vocab_size"],
            max_model_len=self.script.max_model_len,
            block_size=16,
            num_blocks=64,
            max_num_seqs=8,
        )


def _logprobs(token: int, count: int) -> TokenLogprobs:
    tops = tuple((token + i) % 32 for i in range(count))
    return TokenLogprobs(token, -0.5, 1, tops, tuple(-0.5 - i for i in range(count)))


def _exit_with_server() -> None:
    # Not sys.stdin: its lock, held by this thread, would abort the interpreter when it exits by itself.
    while os.read(0, 1):
        pass
    os._exit(0)


def main() -> int:
    script, config = Script(**json.loads(sys.argv[1])), RunnerConfig.from_json(sys.argv[2])
    if not script.linger:
        threading.Thread(target=_exit_with_server, daemon=True).start()
    runner = ScriptedRunner(script, config)

    def hang(number: int, frame: FrameType | None) -> None:
        runner.hanging = not runner.hanging

    def fail(number: int, frame: FrameType | None) -> None:
        runner.failing = True

    def hold(number: int, frame: FrameType | None) -> None:
        runner.held, runner.nudged = not runner.held, False

    def nudge(number: int, frame: FrameType | None) -> None:
        runner.nudged = True

    signal.signal(HOLD, hold)
    signal.signal(NUDGE, nudge)
    signal.signal(signal.SIGUSR1, hang)
    signal.signal(signal.SIGUSR2, fail)
    return runner.run()


if __name__ == "__main__":
    sys.exit(main())
