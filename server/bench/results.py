"""The results as JSON: one line a point for `--json`, everything for `--output`."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from server.bench.campaign import Point
from server.bench.jobs import Outcome
from server.bench.summary import Limits, summarise

FORMAT = 1
"""Of the file: raised when members change their meaning."""
_SECRET = ("api_key",)
_NOT_OPTIONS = ("run", "run_bench", "command", "bench", "version", "output", "html", "json", "progress")
"""Says nothing about what was measured; and whoever is shown a report has no business with its author's folders."""


@dataclass
class Results:
    """Of one run of the command."""

    flags: argparse.Namespace
    limits: Limits | None
    started: str
    """ISO 8601, UTC."""
    points: list[Point]

    @property
    def options(self) -> dict[str, Any]:
        """The flags, without secrets."""
        hidden = {*_SECRET, *_NOT_OPTIONS}
        return {name: value for name, value in vars(self.flags).items() if name not in hidden}

    def point_body(self, point: Point) -> dict[str, Any]:
        """A point's figures, and what they are figures of."""
        flags = self.flags
        return {
            "model": point.server.model,
            "label": flags.label,
            "url": point.server.url,
            "load": point.label,
            "concurrency": point.concurrency,
            "rounds": len(point.outcomes),
            "workload": flags.workload,
            "input_len": flags.input_len,
            "output_len": flags.output_len,
            **point.summary(self.limits).body(),
        }

    def comparisons(self) -> Iterator[dict[str, Any]]:
        """Of each load, the first server's figures over the second's."""
        for first, second in zip(self.points[::2], self.points[1::2], strict=False):
            yield comparison(first, second)

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "format": FORMAT,
            "tool": "intarsia bench serve",
            "started": self.started,
            "options": self.options,
            "points": [self.point_body(point) | {"per_round": _rounds(point.outcomes)} for point in self.points],
        }
        if self.flags.compare is not None:
            body["comparisons"] = list(self.comparisons())
        return body

    def write(self, path: Path) -> None:
        """Raises OSError."""
        path.write_bytes(msgspec.json.encode(self.body()) + b"\n")


def comparison(first: Point, second: Point) -> dict[str, Any]:
    """Ratios, first over second, each the median of the rounds' ratios, with the lowest and the highest round's."""
    figures: dict[str, Any] = {"load": first.label, "first": first.server.url, "second": second.server.url}
    pairs = [
        (summarise([ours]), summarise([theirs])) for ours, theirs in zip(first.outcomes, second.outcomes, strict=True)
    ]
    figures["output_tokens_per_second"] = _ratios(
        [(ours.output_tokens_per_second, theirs.output_tokens_per_second) for ours, theirs in pairs]
    )
    for name in ("ttft", "tpot", "itl", "e2el"):
        both = [(getattr(ours, name), getattr(theirs, name)) for ours, theirs in pairs]
        known = [(ours, theirs) for ours, theirs in both if ours is not None and theirs is not None]
        for percentile in ("p50", "p99"):
            ratios = _ratios([(getattr(ours, percentile), getattr(theirs, percentile)) for ours, theirs in known])
            figures[f"{name}_{percentile}"] = ratios
    return figures


def _ratios(pairs: Sequence[tuple[float, float]]) -> dict[str, float] | None:
    """None where there is nothing to divide by."""
    ratios = [ours / theirs for ours, theirs in pairs if theirs > 0]
    if not ratios:
        return None
    figures = {"median": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}
    return {name: round(value, 4) for name, value in figures.items()}


def _rounds(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    return [_round(outcome) for outcome in outcomes]


def _round(outcome: Outcome) -> dict[str, Any]:
    """One round's throughput and requests; their times are seconds after the round's first request was sent."""
    zero = min(record.start for record in outcome.records)
    requests = []
    for record in outcome.records:
        body: dict[str, Any] = msgspec.to_builtins(record)
        for name in ("start", "end", "scheduled", "first", "last"):
            body[name] = None if body[name] is None else round(body[name] - zero, 6)
        body["gaps"] = [round(gap, 6) for gap in record.gaps]
        requests.append(body)
    throughput = summarise([outcome]).output_tokens_per_second
    return {"output_tokens_per_second": round(throughput, 2), "requests": requests}
