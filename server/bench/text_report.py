"""What the terminal shows: one line of live progress, and a table of figures for each point."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from server.bench.campaign import Point
from server.bench.summary import Limits, Summary
from server.bench.workers import Progress

BUSY = 0.8
"""From this share of a core on, a client process may have been the limit."""


class ProgressLine:
    """Writes to stderr. On a terminal one line that is written over; elsewhere a line every ten seconds."""

    def __init__(self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._on_terminal = self._stream.isatty()
        self._last = clock()

    def __call__(self, point: Point, round_: int, total: int, progress: Progress) -> None:
        now = self._clock()
        if not self._on_terminal and now - self._last < 10:
            return
        self._last = now
        in_flight = progress.sent - progress.answered - progress.failed
        failed = f", {progress.failed} failed" if progress.failed else ""
        text = (
            f"{point.server.url} {point.label}, round {round_ + 1}: {progress.answered + progress.failed}/{total}"
            f" answered, {in_flight} in flight{failed}, {progress.tokens:,} tokens"
        )
        self._stream.write(f"\r\x1b[K{text}" if self._on_terminal else text + "\n")
        self._stream.flush()

    def clear(self) -> None:
        if self._on_terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def table(point: Point, limits: Limits | None) -> str:
    """A point's figures, for people."""
    summary = point.summary(limits)
    lines = [f"── {point.server.url}  {point.server.model}  {point.label} "]
    lines += [f"{name:<28}{value}" for name, value in _scalars(summary, limits)]
    lines += ["", f"{'ms':<10}{'mean':>11}{'p50':>11}{'p90':>11}{'p99':>11}{'max':>11}", *_latencies(summary)]
    lines += [f"error {kind} × {count}: {summary.error_examples[kind]}" for kind, count in summary.errors.items()]
    if summary.cpu_share > BUSY:
        lines.append(
            f"note: a client process was busy {summary.cpu_share:.0%} of the time; its figures may be its own limit"
            " (raise --procs)"
        )
    return "\n".join([*lines, ""])


def _scalars(summary: Summary, limits: Limits | None) -> list[tuple[str, str]]:
    rows = [
        ("requests answered", f"{summary.num_answered} of {summary.num_sent} in {summary.seconds:.2f} s"),
        ("requests/s", f"{summary.requests_per_second:.2f}"),
        ("output tok/s", f"{summary.output_tokens_per_second:,.1f}"),
        ("output tokens", f"{summary.output_tokens:,}"),
        ("most in flight", str(summary.peak_concurrency)),
    ]
    if summary.input_tokens is not None:
        rows.insert(3, ("input tok/s", f"{summary.input_tokens / summary.seconds:,.1f}"))
    if summary.cached_tokens:
        rows.append(("of input tokens cached", f"{summary.cached_tokens:,}"))
    if summary.num_wrong_length:
        rows.append(("answers of another length", str(summary.num_wrong_length)))
    if summary.good is not None and limits is not None:
        asked = ", ".join(f"{name} ≤ {limit * 1e3:g} ms" for name, limit in limits.items())
        rows.append(("goodput requests/s", f"{summary.good / summary.seconds:.2f} ({summary.good} good: {asked})"))
    return rows


def _latencies(summary: Summary) -> list[str]:
    lines = []
    for name in ("ttft", "tpot", "itl", "e2el", "lateness"):
        values = getattr(summary, name)
        if values is not None:
            figures = (values.mean, values.p50, values.p90, values.p99, values.max)
            lines.append(f"{name.upper():<10}" + "".join(f"{figure:>11.2f}" for figure in figures))
    return lines


def comparison_table(figures: Mapping[str, Any]) -> str:
    """`results.comparison` for people."""
    lines = [
        f"── {figures['load']}: {figures['first']} over {figures['second']}, median of the rounds (lowest–highest)"
    ]
    for name, ratios in figures.items():
        if isinstance(ratios, dict):
            spread = f"({ratios['lowest']:.3f}–{ratios['highest']:.3f})"
            lines.append(f"{name:<28}{ratios['median']:.3f} {spread}")
    return "\n".join([*lines, ""])
