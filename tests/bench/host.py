"""`make bench-host`: what the engine's own Python takes a step, with the device's work replaced by nothing.

    python -m tests.bench.host [--steps 400] [--batches 1 64 256] [--workers 8] [--profile]
    python -m tests.bench.host --compare ../other-worktree [--rounds 3]

The real engine, scheduler, staging and endpoint on a tiny model; the device finds graphs that do nothing, and the same
tokens after every step. What steps produce is sent through the endpoint's real sockets to `--workers` workers, in a
process of their own that takes it in and does nothing with it. Microseconds of a step, by part:

- schedule: which sequences run, their blocks, the step's record;
- launch: staging, and handing both halves to the device (which is nothing, so copies of a few KiB are in it);
- retire: the results of the step before, and what ended;
- emit: encoding and sending what that made, one message a worker.

`decode N`: N sequences decode, nothing else happens (but that a block is full now and then). `closed N`: N requests in
flight, prompts of 512 ids, 128 tokens each, a new one for each that ends. `rows`: one request with a prompt of 700
embedding rows of 2 KiB, all of its way but the socket in.

`--compare`: the same by the code of another folder, in turn, in processes of their own; prints the medians of both.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import multiprocessing
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import zmq

import runner.device_step
from runner.config import RunnerConfig
from runner.endpoint import Endpoint
from runner.engine import Engine
from runner.messages import DIGEST_BYTES, EMBEDDING_ID, Generate, Hello, SamplingParams, Span, StepOutput, encode
from runner.sequence import Request
from tests.bench.wire import synthetic

PARTS = ("schedule", "launch", "retire", "emit")
PROMPT, ANSWER = 512, 128
ROWS = 700


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--closed", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-prefix-caching", action="store_true", help="as the server does without it")
    parser.add_argument("--profile", action="store_true", help="the functions that take the time, by cProfile")
    parser.add_argument("--compare", type=Path, help="another version's folder")
    parser.add_argument("--rounds", type=int, default=3, help="of --compare")
    parser.add_argument("--json", action="store_true", help="one JSON line instead of the table")
    arguments = parser.parse_args()
    if arguments.compare is not None:
        return compare(arguments)
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(arguments, Path(folder))
    print(json.dumps(figures) if arguments.json else table(figures))


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, dict[str, float]]:
    config = RunnerConfig(
        address=f"ipc://{folder / 'runner'}", model=str(synthetic(folder / "model", 4096)), dtype="bfloat16",
        device=arguments.device, max_model_len=4096, max_num_seqs=256, max_num_batched_tokens=8192,
        chunked_prefill_size=2048, kv_cache_memory_bytes=128 << 20, enforce_eager=True, async_scheduling=True,
    )  # fmt: skip
    figures: dict[str, dict[str, float]] = {}
    with sink(folder, config, arguments.workers) as endpoint:
        bench = Bench(Engine.load(config, endpoint.emit), arguments.workers, private=arguments.no_prefix_caching)
        for batch in arguments.batches:
            with profiled(arguments.profile, f"decode {batch}"):
                figures[f"decode {batch}"] = bench.decode(batch, arguments.steps)
        for flight in arguments.closed:
            with profiled(arguments.profile, f"closed {flight}"):
                figures[f"closed {flight}"] = bench.closed(flight, arguments.steps)
        figures["rows"] = bench.rows(30)
    return figures


@contextmanager
def profiled(wanted: bool, name: str) -> Iterator[None]:
    if not wanted:
        yield
        return
    profile = cProfile.Profile()
    profile.enable()
    yield
    profile.disable()
    print(f"--- {name}")
    pstats.Stats(profile).sort_stats("tottime").print_stats(28)


# --- workers ---------------------------------------------------------------------------------------------------------


@contextmanager
def sink(folder: Path, config: RunnerConfig, workers: int) -> Iterator[Endpoint]:
    """An endpoint, and as many workers that have greeted it and take in what it sends."""
    endpoint = Endpoint(config)
    process = multiprocessing.get_context("spawn").Process(target=take_in, args=(str(folder), workers), daemon=True)
    process.start()
    while len(endpoint._out) < workers:
        time.sleep(0.01)
    try:
        yield endpoint
    finally:
        endpoint.close()
        process.terminate()
        process.join()


def take_in(folder: str, workers: int) -> None:
    context, poller = zmq.Context(), zmq.Poller()
    to_runner = context.socket(zmq.PUSH)
    to_runner.connect(f"ipc://{folder}/runner")
    for worker in range(workers):
        socket = context.socket(zmq.PULL)
        socket.bind(f"ipc://{folder}/worker{worker}")
        poller.register(socket, zmq.POLLIN)
        to_runner.send(encode(Hello(worker, f"ipc://{folder}/worker{worker}")))
    while True:
        for socket, _ in poller.poll():
            socket.recv()


# --- an engine without a device ---------------------------------------------------------------------------------------


class NoGraph:
    def replay(self) -> None:
        """The device's work."""


class NoGraphs:
    mixed_sizes: list[int] = []  # noqa: RUF012

    def forward(self, size: object) -> NoGraph:
        return NoGraph()

    def sampling(self, entries: int, asks: object) -> NoGraph:
        return NoGraph()


class NoStream:
    """As CUDA's: what is handed over has been queued when the call returns, and here it is done as well."""

    def run(self, work: Callable[[], None]) -> None:
        work()

    def record(self, again: object = None) -> NoStream:
        return self

    def wait(self) -> None:
        """Nothing is in flight."""


class Bench:
    def __init__(self, engine: Engine, workers: int, *, private: bool) -> None:
        self._engine, self._workers, self._private = engine, workers, private
        self._number, self._ended = 0, 0
        self._random = np.random.default_rng(0)
        self._seconds: dict[str, float] = defaultdict(float)
        device: Any = engine.device
        device._graphs, device.stream = NoGraphs(), NoStream()
        setattr(runner.device_step, "admit", lambda *_: None)  # noqa: B010 - it is not that module's own
        # As large as real ones: small ints are objects that exist already.
        device._sampled.copy_(torch.from_numpy(self._random.integers(1000, 150_000, len(device._sampled))))
        bench: Any = self
        for owner, name, part in (
            (engine.scheduler, "schedule", "schedule"),
            (device, "launch_forward", "launch"),
            (device, "launch_sampling", "launch"),
            (engine, "_retire_first", "retire"),
            (engine, "_emit", "emit"),
        ):
            setattr(owner, name, bench._timed(getattr(owner, name), part))
        self._send, engine._emit = engine._emit, self._emit

    def _timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        seconds, clock = self._seconds, time.perf_counter

        def timed(*arguments: Any) -> Any:
            started = clock()
            result = function(*arguments)
            seconds[part] += clock() - started
            return result

        return timed

    def _emit(self, worker: int, output: StepOutput) -> None:
        self._ended += len(output.ends)
        self._send(worker, output)

    def decode(self, batch: int, steps: int) -> dict[str, float]:
        for i in range(batch):  # not all of them fill their blocks in the same step
            self._engine.add(self._request(ids=100 + i % self._engine.info.block_size, answer=100 + 2 * steps))
        table = self._engine.scheduler.table
        while self._engine.scheduler.waiting or ((table.length - table.computed)[table.open] > 1).any():
            self._engine.step()
        for _ in range(20):
            self._engine.step()
        figures = summary([self._step() for _ in range(steps)])
        self._finish()
        return figures

    def closed(self, flight: int, steps: int) -> dict[str, float]:
        """Ends are spread over the steps, as they are in a loop that has run for a while."""
        for i in range(flight):
            self._engine.add(self._request(ids=PROMPT, answer=1 + ANSWER * (i + 1) // flight))
        times = []
        for _ in range(ANSWER + steps):
            self._ended = 0
            times.append(self._step())
            requests = [self._request(ids=PROMPT, answer=ANSWER) for _ in range(self._ended)]
            started = time.perf_counter()
            for request in requests:
                self._engine.add(request)
            times[-1]["add"] = time.perf_counter() - started
            times[-1]["step"] += times[-1]["add"]
        self._finish()
        return summary(times[ANSWER:])

    def rows(self, times: int) -> dict[str, float]:
        """A request's way in: the message is checked, the request queued, scheduled and staged."""
        found = []
        for _ in range(times):
            message, frames = self._message(ids=0, rows=ROWS, answer=1)
            started = time.perf_counter()
            request = self._checked(message, frames)
            checked = time.perf_counter()
            self._engine.add(request)
            added = time.perf_counter()
            first = self._step()
            first |= {"check": checked - started, "add": added - checked}
            first["step"] += first["check"] + first["add"]
            found.append(first)
            self._finish()
        return summary(found)

    def _step(self) -> dict[str, float]:
        self._seconds.clear()
        started = time.perf_counter()
        self._engine.step()
        taken = {"step": time.perf_counter() - started, **{part: self._seconds[part] for part in PARTS}}
        taken["retire"] -= taken["emit"]
        return taken

    def _finish(self) -> None:
        for key in list(self._engine.scheduler.requests):
            self._engine.abort(key)
        while self._engine.has_work:
            self._engine.step()

    def _message(self, *, ids: int, answer: int, rows: int = 0) -> tuple[Generate, list[memoryview]]:
        self._number += 1
        token_ids = np.full(ids + rows, EMBEDDING_ID, np.int32)
        token_ids[rows:] = self._random.integers(0, self._engine.info.vocab_size, ids)
        spans = (Span(0, rows),) if rows else ()
        data = self._random.bytes(rows * self._engine.info.hidden_size * 2)
        digests = self._random.bytes(rows * DIGEST_BYTES)
        frames = [token_ids.tobytes(), digests, *([data] if rows else [])]
        message = Generate(
            self._number % self._workers, self._number, 1, SamplingParams(answer, temperature=0.0), spans
        )
        # As they come out of a socket.
        return msgspec.msgpack.decode(encode(message), type=Generate), [memoryview(frame) for frame in frames]

    def _checked(self, message: Generate, frames: list[memoryview]) -> Request:
        info = self._engine.info
        return Request.from_message(
            message, frames, vocab_size=info.vocab_size, row_size=info.hidden_size * 2,
            max_model_len=info.max_model_len, block_size=info.block_size, private_cache=self._private,
        )  # fmt: skip

    def _request(self, *, ids: int, answer: int) -> Request:
        return self._checked(*self._message(ids=ids, answer=answer))


def summary(times: list[dict[str, float]]) -> dict[str, float]:
    """Microseconds: the median step, and each part's mean share of all steps' time but the slowest tenth's."""
    kept = sorted(times, key=lambda each: each["step"])[: -(-len(times) * 9 // 10)]
    names = [name for name in kept[0] if name != "step"]
    return {
        "median": 1e6 * statistics.median(each["step"] for each in times),
        "mean": 1e6 * statistics.fmean(each["step"] for each in kept),
        **{name: 1e6 * statistics.fmean(each[name] for each in kept) for name in names},
    }


def table(figures: dict[str, dict[str, float]]) -> str:
    lines = []
    for name, parts in figures.items():
        lines.append(f"{name:<12}" + "".join(f"{part:>10} {took:6.1f}" for part, took in parts.items()))
    return "\n".join(lines)


# --- another version beside it ----------------------------------------------------------------------------------------


def compare(arguments: argparse.Namespace) -> None:
    """Both versions run this file; what it imports is their own."""
    options = [f"--{name}={getattr(arguments, name)}" for name in ("steps", "workers", "device")]
    options += ["--no-prefix-caching"] if arguments.no_prefix_caching else []
    for name in ("batches", "closed"):
        options += [f"--{name}", *map(str, getattr(arguments, name))]
    folders = {"there": arguments.compare.resolve(), "here": Path.cwd()}
    found: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in folders}
    for _ in range(arguments.rounds):
        for name, folder in folders.items():
            run = subprocess.run(
                [sys.executable, "-P", __file__, "--json", *options], cwd=folder, check=True, capture_output=True,
                env={**os.environ, "PYTHONPATH": str(folder)}, text=True,
            )  # fmt: skip
            found[name].append(json.loads(run.stdout.splitlines()[-1]))
    for case, parts in found["here"][0].items():
        for name, rounds in found.items():
            middle = {part: statistics.median(each[case][part] for each in rounds) for part in parts}
            print(f"{name:<6}", table({case: middle}))


if __name__ == "__main__":
    main()
