"""Runs `intarsia bench serve`: flags in, points measured, results out. Called by `server.bench_command`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from server.bench.campaign import Campaign, Point, Server
from server.bench.discovery import find_model, find_rows
from server.bench.flags import DEFAULT_VOCAB_SIZE, UsageError
from server.bench.html_report import html_report
from server.bench.http_connection import CallFailed, Target
from server.bench.levels import build_levels, num_procs
from server.bench.results import Results
from server.bench.sources import ROW_FLAGS, build_source
from server.bench.text_report import ProgressLine, comparison_table, table
from server.bench.workers import ClientProcesses, LoadError

FAILED, USAGE, INTERRUPTED = 1, 2, 130


def run(arguments: argparse.Namespace) -> int:
    """0: measured, and at least one request of each point was answered; 1: not; 2: wrong usage."""
    try:
        return _run(arguments)
    except UsageError as error:
        return _complain(str(error), USAGE)
    except (CallFailed, LoadError) as error:
        return _complain(str(error), FAILED)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)


def _run(flags: argparse.Namespace) -> int:
    source = build_source(flags)
    levels = build_levels(flags, source)
    files = _open_results(flags)
    rounds = flags.rounds or (1 if flags.compare is None else 3)
    servers = _servers(flags)
    _fill_in(flags, servers)
    campaign = Campaign(servers, levels, source.make, rounds, flags.timeout)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    results = Results(flags, dict(flags.goodput) if flags.goodput else None, started, [])
    try:
        _measure(campaign, num_procs(flags.procs, levels), results)
    finally:
        _write(results, files)  # also what there was before an interruption
    return 0 if all(_was_answered(point) for point in results.points) else FAILED


def _measure(campaign: Campaign, procs: int, results: Results) -> None:
    progress = ProgressLine() if results.flags.progress else None
    with ClientProcesses(procs) as clients:
        for point in campaign.run(clients, progress or (lambda *_: None)):
            if progress is not None:
                progress.clear()
            results.points.append(point)
            _show(point, results)
    if results.flags.compare is not None:
        _show_comparisons(results)


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


def _fill_in(flags: argparse.Namespace, servers: Sequence[Server]) -> None:
    """--vocab-size and --hidden where they are needed and not given. Raises UsageError where no server says it."""
    asked = [name for name in ROW_FLAGS.get(flags.workload, ()) if getattr(flags, name) is None]
    if not asked:
        return
    found = find_rows([server.target for server in servers])
    if "vocab_size" in asked:
        flags.vocab_size = min((rows.vocab_size for rows in found), default=DEFAULT_VOCAB_SIZE)
    if "hidden" in asked:
        widths = {rows.hidden for rows in found}
        if len(widths) != 1:
            problem = "the two servers' models have rows of different sizes" if widths else "the server doesn't say it"
            raise UsageError(f"--workload {flags.workload} needs --hidden: {problem}")
        flags.hidden = widths.pop()


def _show(point: Point, results: Results) -> None:
    if results.flags.json:
        print(json.dumps(results.point_body(point)), flush=True)
    else:
        print(table(point, results.limits), flush=True)


def _show_comparisons(results: Results) -> None:
    for figures in results.comparisons():
        print(json.dumps({"comparison": figures}) if results.flags.json else comparison_table(figures), flush=True)


def _open_results(flags: argparse.Namespace) -> dict[str, Path]:
    """Where results go. A file that can't be written is found out before an hour of measuring, not after it."""
    files = {name: Path(path) for name in ("output", "html") if (path := getattr(flags, name)) is not None}
    for name, path in files.items():
        try:
            path.open("ab").close()
        except OSError as error:
            raise UsageError(f"--{name}: can't write {path}: {error.strerror}") from None
    return files


def _write(results: Results, files: dict[str, Path]) -> None:
    if not results.points:
        return
    if "output" in files:
        results.write(files["output"])
    if "html" in files:
        files["html"].write_text(html_report(results), encoding="utf-8")


def _was_answered(point: Point) -> bool:
    return any(record.error is None for outcome in point.outcomes for record in outcome.records)


def _complain(message: str, status: int) -> int:
    print(f"intarsia bench serve: {message}", file=sys.stderr)
    return status
