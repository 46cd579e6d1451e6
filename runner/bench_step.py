"""Times the engine's steps without HTTP: `intarsia bench step`.

One line a kind and size of step. `step`: wall-clock time from step to step, with everything that the engine does.
`host`: the part of it in which Python worked; the rest waited for the device, so where the two are close the host is
the limit.
`floor`: the least time that the step's bytes or operations need, whichever takes longer. Medians; random ids, greedy.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass, replace
from typing import TextIO

import msgspec
import numpy as np

from runner.config import RunnerConfig
from runner.default_model import DefaultModelError
from runner.engine import Engine
from runner.kv_cache import bytes_per_block
from runner.limits import BadConfiguration
from runner.messages import Generate, SamplingParams, StepOutput
from runner.model import UnsupportedModel
from runner.sequence import Request

STEPS = 30
_SETTLING_STEPS = 3


@dataclass(frozen=True)
class Options:
    context: int
    """Rows of each sequence before its first timed decode."""
    decode_batches: list[int]
    prefill_rows: list[int]
    bytes_per_second: float
    """What the device can do at best; 0 leaves the floors out."""
    flop_per_second: float


def bench_step(config: RunnerConfig, options: Options, out: TextIO) -> None:
    """Prints the table; leaves out what the engine is too small for.

    Raises:
        UnsupportedModel, BadConfiguration, DefaultModelError: fit for the operator.
    """
    engine = Engine.load(replace(config, enable_prefix_caching=False), _drop)
    bench, context = _Bench(engine, options), options.context
    floors = f"{'floor ms':>10}{'floor/step':>12}" if options.bytes_per_second else ""
    print(f"{'':<16}{'step ms':>9}{'host ms':>9}{floors}", file=out)
    for batch in options.decode_batches:
        fits = context + 2 * STEPS <= engine.info.max_model_len
        fits &= batch * bench.blocks(context + 2 * STEPS) < engine.info.num_blocks
        if fits and batch <= engine.limits.max_num_seqs:
            bench.report(f"decode {batch}", bench.decode(batch, context), bench.floor(batch, batch, context), out)
    for rows in options.prefill_rows:
        if rows <= min(engine.limits.max_num_batched_tokens, engine.limits.max_model_len - 1):
            bench.report(f"prefill {rows}", bench.prefill(rows), bench.floor(rows, 1, rows / 2), out)


def _drop(worker: int, output: StepOutput) -> None:
    del worker, output


class _Bench:
    def __init__(self, engine: Engine, options: Options) -> None:
        self._engine, self._options = engine, options
        self._random = np.random.default_rng(0)
        self._number = 0

    def blocks(self, rows: int) -> int:
        return -(-rows // self._engine.info.block_size)

    def decode(self, batch: int, context: int) -> list[tuple[float, float]]:
        """(step, host) seconds of steps of `batch` decodes."""
        for _ in range(batch):
            self._add(context, self._engine.info.max_model_len)
        while self._engine.scheduler.waiting or not self._all_decode():
            self._engine.step()
        times = [self._step() for _ in range(_SETTLING_STEPS + STEPS)][_SETTLING_STEPS:]
        self._finish()
        return times

    def prefill(self, rows: int) -> list[tuple[float, float]]:
        """(step, host) seconds of steps that are one whole prompt."""
        times = []
        for _ in range(8):
            self._add(rows, 1)
            started, host = time.perf_counter(), 0.0
            while self._engine.has_work:
                host += self._step()[1]
            times.append((time.perf_counter() - started, host))
        return times[_SETTLING_STEPS:]

    def _step(self) -> tuple[float, float]:
        started, waited = time.perf_counter(), self._engine.waited_seconds
        self._engine.step()
        took = time.perf_counter() - started
        return took, took - (self._engine.waited_seconds - waited)

    def _all_decode(self) -> bool:
        table = self._engine.scheduler.table
        return bool(((table.length - table.computed)[table.open] == 1).all())

    def _add(self, rows: int, max_tokens: int) -> None:
        engine, info = self._engine, self._engine.info
        self._number += 1
        ids = self._random.integers(0, info.vocab_size, rows, dtype=np.int32)
        sampling = SamplingParams(max_tokens=min(max_tokens, info.max_model_len - rows), temperature=0.0)
        request = Request.from_message(
            Generate(0, self._number, 1, sampling),
            [memoryview(ids.tobytes()), memoryview(b"")],
            vocab_size=info.vocab_size,
            row_size=info.hidden_size * engine.model.dtype.itemsize,
            max_model_len=info.max_model_len,
            block_size=info.block_size,
            private_cache=True,
        )
        engine.add(request)

    def _finish(self) -> None:
        for key in list(self._engine.scheduler.requests):
            self._engine.abort(key)
        while self._engine.has_work:
            self._engine.step()

    def floor(self, rows: int, entries: int, context: float) -> float:
        """Seconds: weights and KV read once, or two operations a weight and row; the head's for one row an entry."""
        if not self._options.bytes_per_second:
            return 0.0
        model, info = self._engine.model, self._engine.info
        head = info.vocab_size * info.hidden_size
        kv = entries * context * bytes_per_block(model.kv_shapes, 1, model.dtype)
        read = (model.num_weights + head) * model.dtype.itemsize + kv
        operations = 2.0 * (model.num_weights * rows + head * entries)
        return float(max(read / self._options.bytes_per_second, operations / self._options.flop_per_second))

    def report(self, name: str, times: list[tuple[float, float]], floor: float, out: TextIO) -> None:
        step, host = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
        line = f"{name:<16}{step:>9.3f}{host:>9.3f}"
        print(line + (f"{1e3 * floor:>10.3f}{1e3 * floor / step:>12.2f}" if floor else ""), file=out, flush=True)


def main() -> int:
    config = RunnerConfig.from_json(sys.argv[1])
    try:
        bench_step(config, msgspec.json.decode(sys.argv[2], type=Options), sys.stdout)
    except (UnsupportedModel, BadConfiguration, DefaultModelError) as error:
        print(f"intarsia: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
