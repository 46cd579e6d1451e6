"""Runs `intarsia bench serve`: flags in, points measured, results out. Called by `server.bench_command`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from server.bench.campaign import Campaign, Point, Server, find_model
from server.bench.http_connection import CallFailed, Target
from server.bench.options import UsageError, build_levels, goodput_limits, num_procs, workload_maker
from server.bench.summary import Limits
from server.bench.text_report import ProgressLine, table
from server.bench.workers import ClientProcesses, LoadError

FAILED, USAGE = 1, 2


def run(arguments: argparse.Namespace) -> int:
    """0: measured, and at least one request of each point was answered; 1: not; 2: wrong usage."""
    try:
        return _run(arguments)
    except UsageError as error:
        return _complain(str(error), USAGE)
    except (CallFailed, LoadError) as error:
        return _complain(str(error), FAILED)
    except KeyboardInterrupt:
        return _complain("interrupted", 130)


def _run(flags: argparse.Namespace) -> int:
    limits = goodput_limits(flags.goodput)
    make_workload = workload_maker(flags)
    levels = build_levels(flags)
    rounds = flags.rounds or (1 if flags.compare is None else 3)
    campaign = Campaign(_servers(flags), levels, make_workload, rounds, flags.timeout)
    progress = ProgressLine() if flags.progress else None
    points = []
    with ClientProcesses(num_procs(flags.procs, levels)) as clients:
        for point in campaign.run(clients, progress or (lambda *_: None)):
            if progress is not None:
                progress.clear()
            _show(point, flags, limits)
            points.append(point)
    return 0 if all(_was_answered(point) for point in points) else FAILED


def _servers(flags: argparse.Namespace) -> list[Server]:
    urls = [(flags.url, flags.model)]
    if flags.compare is not None:
        urls.append((flags.compare, flags.compare_model))
    servers = []
    for url, model in urls:
        try:
            target = Target.parse(url, flags.api_key)
        except ValueError as error:
            raise UsageError(str(error)) from None
        servers.append(Server(url, target, model or find_model(target)))
    return servers


def _show(point: Point, flags: argparse.Namespace, limits: Limits | None) -> None:
    if flags.json:
        print(json.dumps(point_body(point, flags, limits)), flush=True)
    else:
        print(table(point, limits), flush=True)


def point_body(point: Point, flags: argparse.Namespace, limits: Limits | None) -> dict[str, Any]:
    """A point's figures and what they are figures of."""
    return {
        "model": point.server.model,
        "label": flags.label,
        "url": point.server.url,
        "load": point.label,
        "concurrency": point.concurrency,
        "workload": flags.workload,
        "input_len": flags.input_len,
        "output_len": flags.output_len,
        **point.summary(limits).body(),
    }


def _was_answered(point: Point) -> bool:
    return any(record.error is None for outcome in point.outcomes for record in outcome.records)


def _complain(message: str, status: int) -> int:
    print(f"intarsia bench serve: {message}", file=sys.stderr)
    return status
