"""From the flags to a campaign: which workload, which load levels, which limits. Raises UsageError, before anything is
sent, where flags don't fit together."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from server.bench.arrivals import Arrivals
from server.bench.campaign import Level
from server.bench.flags import LIMITS
from server.bench.summary import Limits
from server.bench.workloads import Common, Mixed, RandomEmbeds, RandomIds, RandomText, Workload

_MAX_AUTO_PROCS = 4


class UsageError(Exception):
    """Flags that don't fit together. The message names them."""


def build_levels(flags: argparse.Namespace, available: int = 0) -> list[Level]:
    """`available`: how many requests the workload has, 0: as many as one likes."""
    if flags.sweep is not None:
        return [_closed(flags, concurrency, available) for concurrency in _sweep(flags)]
    if flags.request_rate is not None:
        return [_open(flags, available)]
    for name in ("ramp_to", "burstiness", "duration"):
        if getattr(flags, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} needs --request-rate")
    return [_closed(flags, flags.concurrency or 1, available)]


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
    due = arrivals.count_in(60.0 if flags.duration is None else flags.duration)
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
    burstiness = {"constant": None, "poisson": 1.0, "gamma": flags.burstiness or 1.0}[flags.arrivals]
    return Arrivals(flags.request_rate, flags.ramp_to, burstiness, flags.seed)


def _count(flags: argparse.Namespace, available: int, default: int) -> int:
    if flags.num_requests is None:
        return available or default
    if available and flags.num_requests > available:
        raise UsageError(f"--num-requests {flags.num_requests}: the file has only {available}")
    return int(flags.num_requests)


def workload_maker(flags: argparse.Namespace) -> Callable[[str, int], Workload]:
    """A function that makes the workload for a model's name and a number added to the seed."""
    extra = _extra_body(flags.extra_body)
    needs_hidden = flags.workload in ("embeds", "mixed")
    if needs_hidden and flags.hidden is None:
        raise UsageError(f"--workload {flags.workload} needs --hidden, the model's hidden size")
    if flags.prefix_len and flags.workload not in ("ids", "mixed"):
        raise UsageError("--prefix-len is for ids")
    if flags.prefix_len >= flags.input_len:
        raise UsageError("--prefix-len must be less than --input-len")

    def make(model: str, offset: int) -> Workload:
        common = Common(model, flags.output_len, flags.temperature, flags.ignore_eos, extra)
        return _random(flags, common, flags.seed + offset)

    return make


def _random(flags: argparse.Namespace, common: Common, seed: int) -> Workload:
    ids = RandomIds(common, flags.input_len, flags.vocab_size, seed, flags.prefix_len, flags.num_prefixes)
    if flags.workload == "ids":
        return ids
    if flags.workload == "text":
        return RandomText(common, flags.input_len, seed, flags.chat)
    embeds = RandomEmbeds(common, flags.input_len, flags.hidden, flags.embeds_dtype, flags.embeds_std, seed)
    if flags.workload == "embeds":
        return embeds
    return Mixed((embeds, ids), (flags.embeds_share, 1 - flags.embeds_share), seed)


def _extra_body(text: str) -> dict[str, Any]:
    try:
        extra = json.loads(text)
    except (ValueError, RecursionError):
        extra = None
    if not isinstance(extra, dict):
        raise UsageError(f"--extra-body: {text[:80]!r} is not a JSON object")
    return extra


def goodput_limits(items: Sequence[str] | None) -> Limits | None:
    """`["ttft:200", "tpot:40"]` in seconds, by name."""
    if not items:
        return None
    limits: dict[str, float] = {}
    for item in items:
        name, _, text = item.partition(":")
        try:
            limit = float(text)
        except ValueError:
            limit = -1.0
        if name not in LIMITS or not 0 < limit < 1e9:
            raise UsageError(f"--goodput: {item!r} is not one of {', '.join(f'{each}:MS' for each in LIMITS)}")
        limits[name] = limit / 1e3
    return limits


def num_procs(asked: int | None, levels: Sequence[Level]) -> int:
    if asked is not None:
        return asked
    widest = max(level.concurrency or level.num_requests for level in levels)
    return 1 if widest <= 8 else max(1, min(_MAX_AUTO_PROCS, os.cpu_count() or 1))
