"""From the flags to load levels: how many requests, how many at a time or when. Called by `command`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from server.bench.arrivals import Arrivals
from server.bench.campaign import Level
from server.bench.flags import UsageError
from server.bench.sources import Source

_MAX_AUTO_PROCS = 4
_DEFAULT_SECONDS = 60.0


def build_levels(flags: argparse.Namespace, source: Source) -> list[Level]:
    """Raises UsageError where flags don't fit together."""
    available = source.available
    for name in ("ramp_to", "arrivals", "burstiness", "duration"):
        if flags.request_rate is None and getattr(flags, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} needs --request-rate")
    if flags.sweep is not None:
        return [_closed(flags, concurrency, available) for concurrency in _sweep(flags)]
    if flags.request_rate is not None:
        return [_open(flags, available)]
    if source.times is not None:
        return [_replay(flags, source.times)]
    return [_closed(flags, flags.concurrency or 1, available)]


def _replay(flags: argparse.Namespace, times: tuple[float, ...]) -> Level:
    warmup = 1 if flags.warmup is None else flags.warmup
    return Level(f"trace × {flags.trace_speed:g}", len(times), flags.concurrency, warmup, times)


def _sweep(flags: argparse.Namespace) -> list[int]:
    if flags.concurrency is not None or flags.request_rate is not None:
        raise UsageError("--sweep excludes --concurrency and --request-rate")
    try:
        concurrencies = [int(part) for part in flags.sweep.split(",")]
    except ValueError:
        concurrencies = []
    if not concurrencies or not all(1 <= each <= 100_000 for each in concurrencies):
        raise UsageError(f"--sweep: {flags.sweep!r} is not a list of concurrencies such as 1,8,32")
    return concurrencies


def _closed(flags: argparse.Namespace, concurrency: int, available: int) -> Level:
    count = _count(flags, available, max(16, 4 * concurrency))
    warmup = concurrency if flags.warmup is None else flags.warmup
    return Level(f"concurrency {concurrency}", count, concurrency, warmup)


def _open(flags: argparse.Namespace, available: int) -> Level:
    arrivals = build_arrivals(flags)
    if flags.duration is not None and flags.num_requests is not None:
        raise UsageError("--duration excludes --num-requests")
    due = arrivals.count_in(flags.duration or _DEFAULT_SECONDS)
    count = _count(flags, available, due)
    if flags.duration is not None:
        count = min(due, available) if available else due
    until = "" if flags.ramp_to is None else f" to {flags.ramp_to:g}/s"
    label = f"rate {flags.request_rate:g}/s{until}"
    warmup = 1 if flags.warmup is None else flags.warmup
    return Level(label, count, flags.concurrency, warmup, arrivals.times(count))


def build_arrivals(flags: argparse.Namespace) -> Arrivals:
    if flags.burstiness is not None and flags.arrivals != "gamma":
        raise UsageError("--burstiness needs --arrivals gamma")
    burstiness = {"constant": None, "poisson": 1.0, "gamma": flags.burstiness or 1.0}[flags.arrivals or "poisson"]
    return Arrivals(flags.request_rate, flags.ramp_to, burstiness, flags.seed)


def _count(flags: argparse.Namespace, available: int, default: int) -> int:
    if flags.num_requests is None:
        return available or default
    if available and flags.num_requests > available:
        raise UsageError(f"--num-requests {flags.num_requests}: the file has only {available}")
    return int(flags.num_requests)


def num_procs(asked: int | None, levels: Sequence[Level]) -> int:
    if asked is not None:
        return asked
    widest = max(level.concurrency or level.num_requests for level in levels)
    return 1 if widest <= 8 else max(1, min(_MAX_AUTO_PROCS, os.cpu_count() or 1))
