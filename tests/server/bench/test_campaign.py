"""The order in which points are measured, and ratios of two servers."""

from __future__ import annotations

import pytest

from server.bench.campaign import Campaign, Level, Point, Server
from server.bench.http_connection import Target
from server.bench.jobs import Job, Outcome
from server.bench.records import Record
from server.bench.results import comparison
from server.bench.workloads import Common, RandomIds


def test_servers_take_turns_with_the_same_prompts() -> None:
    jobs: list[Job] = []

    class Clients:
        def run(self, job: Job, on_progress: object) -> Outcome:
            jobs.append(job)
            return Outcome([Record(0, "ids", 0.0, 1.0)], 0.0)

    servers = [Server(name, Target.parse(name), name) for name in ("a", "b")]
    levels = [Level(f"concurrency {width}", 5, width, 1) for width in (1, 8)]
    campaign = Campaign(servers, levels, lambda model, seed: RandomIds(Common(model), 9, seed=seed), rounds=3)
    points = list(campaign.run(Clients(), lambda *_: None))  # type: ignore[arg-type]
    assert [job.target.host for job in jobs] == list("abbaab" * 2)
    assert [(point.server.url, point.concurrency, len(point.outcomes)) for point in points] == [
        ("a", 1, 3), ("b", 1, 3), ("a", 8, 3), ("b", 8, 3),
    ]  # fmt: skip
    seeds = [job.workload.seed for job in jobs]  # type: ignore[attr-defined]
    assert seeds[::2] == seeds[1::2] and len(set(seeds)) == 6


def test_ratios_are_of_rounds() -> None:
    """First over second in each round; then the median, the lowest and the highest of those."""

    def point(url: str, *seconds: float) -> Point:
        """Rounds of one request with two tokens that took so long."""
        records = [
            Record(0, "ids", 0, each, first=each / 2, last=each, gaps=[each / 2], num_events=2) for each in seconds
        ]
        outcomes = [Outcome([record], 0.0) for record in records]
        return Point(Server(url, Target.parse(url), "m"), "concurrency 1", 1, outcomes)

    figures = comparison(point("a", 1.0, 2.0, 4.0), point("b", 2.0, 2.0, 2.0))
    assert figures["output_tokens_per_second"] == {"median": 1.0, "lowest": 0.5, "highest": 2.0}
    assert figures["ttft_p50"] == pytest.approx({"median": 1.0, "lowest": 0.5, "highest": 2.0})


def test_no_ratio_without_answers() -> None:
    failed = Point(Server("a", Target.parse("a"), "m"), "", 1, [Outcome([Record(0, "ids", 0, 1, error="x")], 0.0)])
    figures = comparison(failed, failed)
    assert figures["output_tokens_per_second"] is None and figures["e2el_p99"] is None
