"""`make bench-pace`: what the scheduler makes of a GPU's step times, in simulated time and without the GPU.

    python -m tests.bench.pace [--shape llama] [--concurrency 32] [--num-requests 160] [--request-rate R]
                               [--input-len 512] [--output-len 128] [--chunked-prefill-size N] [--least N]

The real scheduler with its pace of prompts, launching a step ahead as the engine does; what a step takes is read off
`SHAPES`, measured on one H200 (docs/performance.md), and nothing else takes time but the way from a request's last
token to its successor's place in the queue. TTFT is from there. So it shows what a rule is worth before it is tried,
and what a load itself costs: where it begins all prompts come at once, and where it ends few sequences are left.
"""

from __future__ import annotations

import argparse
import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from runner.device_step import max_admitted_rows
from runner.messages import Generate, SamplingParams
from runner.prompt_pace import PromptPace
from runner.scheduler import Scheduler
from runner.sequence import Request
from runner.step import Step

BLOCK, NUM_BLOCKS, MAX_MODEL_LEN, BUDGET = 16, 40_000, 8192, 8192
FIRST_ARRIVALS_MS = 12.0
"""Between the first and the last of a burst: a client's and the API processes' time."""


@dataclass(frozen=True)
class Shape:
    """Milliseconds, by rows; in between them they are interpolated, and beyond them proportional."""

    decodes: dict[int, float]
    """Steps of decodes alone, of some 576 cached rows each."""
    mixed: dict[int, float]
    """Steps with prompt rows, all but their attention; of all rows, at the sizes that they are padded to."""
    decode_attention: float
    """Of each decode, in a step with prompt rows."""
    prompt_attention: float
    """Of each prompt row."""
    beside: float
    """Of every step: what the device does between two forwards."""
    prompts: float
    """Of every step with prompt rows: what their attention takes however few they are, and pauses. Fitted, with
    `turn_ms`, to what was measured over HTTP."""
    most: int
    """Prompt rows of a step in which others decode, at most and at least, as the server finds them at its start."""
    least: int
    turn_ms: float
    """From a request's last token to its successor in the queue: through API process, client, and API process."""

    def milliseconds(self, step: Step) -> float:
        decodes, rows = step.num_decodes, step.num_rows
        if not step.prompt_rows:
            return interpolated(self.decodes, rows) + self.beside
        padded = next((size for size in sorted(self.mixed) if size >= rows), rows)
        attention = self.decode_attention * decodes + self.prompt_attention * (rows - decodes)
        return interpolated(self.mixed, padded) + attention + self.prompts + self.beside


SHAPES = {
    "llama": Shape(
        decodes={1: 3.89, 4: 4.45, 8: 4.60, 16: 4.77, 32: 5.06, 64: 5.55, 128: 7.3, 256: 11.5},
        mixed={
            64: 4.5, 96: 5.15, 128: 5.33, 160: 5.54, 192: 6.08, 256: 6.45, 384: 9.96, 512: 11.1, 640: 13.6, 768: 15.6,
            1024: 20.4, 1280: 25.2, 2048: 39.2, 8192: 160.0,
        },
        decode_attention=0.03, prompt_attention=0.0008, beside=0.1, prompts=0.8, most=1280, least=224, turn_ms=6.0,
    ),
    "qwen": Shape(
        decodes={1: 0.72, 4: 0.99, 8: 1.07, 16: 1.22, 32: 1.36, 48: 1.56, 64: 1.81, 96: 2.62, 128: 3.1, 256: 5.09},
        mixed={
            64: 0.9, 128: 1.24, 192: 1.31, 256: 1.38, 384: 1.55, 512: 1.78, 640: 2.0, 768: 2.2, 1024: 2.7, 1280: 3.16,
            1536: 3.6, 2048: 4.39, 4096: 8.6, 8192: 17.0,
        },
        decode_attention=0.0165, prompt_attention=0.0002, beside=0.04, prompts=0.3, most=2048, least=1984, turn_ms=4.0,
    ),
}  # fmt: skip


def interpolated(table: dict[int, float], rows: int) -> float:
    sizes = sorted(table)
    if rows > sizes[-1]:
        return table[sizes[-1]] * rows / sizes[-1]
    return float(np.interp(rows, sizes, [table[size] for size in sizes]))


@dataclass
class Load:
    """Requests in a closed loop (`concurrency`), or as they come at a rate (requests a second, exponential gaps)."""

    num_requests: int
    input_len: int
    output_len: int
    concurrency: int | None = None
    request_rate: float | None = None


@dataclass
class Outcome:
    """Milliseconds of simulated time."""

    took: float = 0.0
    ttfts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    steps: int = 0


class Simulation:
    def __init__(self, shape: Shape, load: Load, pace: PromptPace) -> None:
        self._shape, self._load = shape, load
        self._scheduler = Scheduler(
            num_slots=256, num_blocks=NUM_BLOCKS, block_size=BLOCK, max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=BUDGET, max_admitted_rows=max_admitted_rows(MAX_MODEL_LEN, BUDGET),
        )  # fmt: skip
        self._scheduler.padded_sizes = sorted(shape.mixed)
        self._scheduler.pace = pace
        self._arrivals: list[float] = first_arrivals(load)
        self._left = load.num_requests - len(self._arrivals)
        self._came: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._outcome = Outcome()

    def run(self) -> Outcome:
        """As `Engine.step`: a step is launched before the one in front of it is retired."""
        now = free = 0.0
        launched: deque[tuple[Step, float]] = deque()
        while self._arrivals or self._scheduler.has_work:
            while self._arrivals and self._arrivals[0] <= now:
                self._add(heapq.heappop(self._arrivals))
            step = self._scheduler.schedule()
            if step is not None:
                free = max(now, free) + self._shape.milliseconds(step)
                launched.append((step, free))
                self._outcome.steps += 1
            if launched and (step is None or len(launched) > 1):
                first, done = launched.popleft()
                now = max(now, done)
                self._retire(first, now)
            elif step is None:
                now = max(now, self._arrivals[0])
        self._outcome.took = now
        return self._outcome

    def _add(self, came: float) -> None:
        number = len(self._came)
        message = Generate(0, number, 1, SamplingParams(self._load.output_len, temperature=0.0))
        ids = np.full(self._load.input_len, 5, np.int32).tobytes()
        self._scheduler.add(
            Request.from_message(
                message, [memoryview(ids), memoryview(b"")], vocab_size=100, row_size=2,
                max_model_len=MAX_MODEL_LEN, block_size=BLOCK, private_cache=True,
            )
        )  # fmt: skip
        self._came[number] = came

    def _retire(self, step: Step, now: float) -> None:
        entries, ended = self._scheduler.retire(step, np.full(step.num_entries, 7, np.int64))
        outcome = self._outcome
        for entry in entries.tolist():
            number = step.sequences[entry].request.key[1]
            outcome.tokens += 1
            if number in self._last:
                outcome.gaps.append(now - self._last[number])
            else:
                outcome.ttfts.append(now - self._came[number])
            self._last[number] = now
        for _ in ended:
            if self._left and self._load.concurrency:
                self._left -= 1
                heapq.heappush(self._arrivals, now + self._shape.turn_ms)


def first_arrivals(load: Load) -> list[float]:
    if load.concurrency:
        count = min(load.concurrency, load.num_requests)
        return [FIRST_ARRIVALS_MS * number / count for number in range(count)]
    gaps = np.random.default_rng(0).exponential(1000 / cast(float, load.request_rate), load.num_requests)
    return cast("list[float]", np.cumsum(gaps).tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--request-rate", type=float, help="requests a second, in place of a concurrency")
    parser.add_argument("--num-requests", type=int, default=160)
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--chunked-prefill-size", type=int, help="as the server's: the same bound in every step")
    parser.add_argument("--least", type=int, help="prompt rows that a step may always have")
    parser.add_argument("--most", type=int, help="and at most")
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]
    if arguments.chunked_prefill_size is not None:
        pace = PromptPace(arguments.chunked_prefill_size)
    else:
        pace = PromptPace(arguments.most or shape.most, arguments.least or shape.least)
    rate = arguments.request_rate
    concurrency = None if rate else arguments.concurrency
    load = Load(arguments.num_requests, arguments.input_len, arguments.output_len, concurrency, rate)
    print(summary(Simulation(shape, load, pace).run()))


def summary(outcome: Outcome) -> str:
    ttft, gap = np.percentile(outcome.ttfts, [50, 90, 99]), np.percentile(outcome.gaps, [50, 99])
    return (
        f"{1000 * outcome.tokens / outcome.took:,.0f} output tok/s   "
        f"TTFT p50, p90, p99 {ttft[0]:.0f}, {ttft[1]:.0f}, {ttft[2]:.0f} ms   "
        f"ITL p50, p99 {gap[0]:.1f}, {gap[1]:.1f} ms   {outcome.steps} steps"
    )


if __name__ == "__main__":
    main()
