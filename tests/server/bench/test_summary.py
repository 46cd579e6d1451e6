"""Figures against numpy and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.bench.jobs import Outcome, share
from server.bench.records import Record
from server.bench.summary import Distribution, summarise


def answered(
    start: float, first: float, gaps: list[float], *, tokens: int | None = None, expected: int | None = None
) -> Record:
    last = first + sum(gaps)
    count = 1 + len(gaps) if tokens is None else tokens
    return Record(
        0,
        "ids",
        start,
        last + 0.5,  # whatever comes behind the last token
        first=first,
        last=last,
        gaps=gaps,
        num_events=1 + len(gaps),
        expected_tokens=count if expected is None else expected,
        prompt_tokens=10,
        completion_tokens=tokens,
        status=200,
    )


def failed(start: float, end: float, kind: str, detail: str = "") -> Record:
    return Record(0, "ids", start, end, error=kind, detail=detail)


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=200))
def test_percentiles_are_numpys(seconds: list[float]) -> None:
    figures = Distribution.of(seconds)
    assert figures is not None
    milliseconds = [value * 1e3 for value in seconds]
    assert figures.mean == pytest.approx(np.mean(milliseconds))
    for name, percentile in (("p50", 50), ("p90", 90), ("p99", 99), ("max", 100)):
        assert getattr(figures, name) == pytest.approx(np.percentile(milliseconds, percentile))


def test_a_distribution_of_nothing() -> None:
    assert Distribution.of([]) is None


def test_by_hand() -> None:
    records = [
        answered(100.0, 100.2, [0.1, 0.3]),  # 3 tokens, ends at 100.6
        answered(100.5, 100.9, [0.1], tokens=5),  # two events for five tokens, ends at 101.0
        failed(99.5, 99.9, "http_429", "full"),
    ]
    figures = summarise([Outcome(records, 0.25)])
    assert figures.seconds == pytest.approx(1.5)  # 99.5, the first that was sent, to 101.0, the last token
    assert (figures.num_sent, figures.num_answered, figures.errors) == (3, 2, {"http_429": 1})
    assert figures.error_examples == {"http_429": "full"}
    assert (figures.output_tokens, figures.token_events, figures.input_tokens) == (8, 5, 20)
    assert figures.output_tokens_per_second == pytest.approx(8 / 1.5)
    assert figures.requests_per_second == pytest.approx(2 / 1.5)
    assert figures.ttft is not None and figures.ttft.mean == pytest.approx(300)
    assert figures.tpot is not None and figures.tpot.mean == pytest.approx((0.4 / 2 + 0.1 / 4) / 2 * 1e3)
    assert figures.itl is not None and figures.itl.mean == pytest.approx(500 / 3)
    assert figures.itl.count == 3
    assert figures.e2el is not None and figures.e2el.max == pytest.approx(600)
    assert figures.lateness is None and figures.good is None
    assert figures.peak_concurrency == 2


def test_rounds_add_up() -> None:
    one = Outcome([answered(0.0, 1.0, [1.0])], 0.5)
    other = Outcome([answered(50.0, 51.0, [1.0, 2.0])], 0.7)
    figures = summarise([one, other])
    assert figures.seconds == pytest.approx(2.0 + 4.0)
    assert (figures.output_tokens, figures.cpu_share, figures.peak_concurrency) == (5, 0.7, 1)


def test_a_failure_that_comes_last_ends_the_window() -> None:
    records = [answered(0.0, 1.0, [1.0]), failed(0.0, 9.0, "timeout")]
    assert summarise([Outcome(records, 0)]).seconds == 9.0


def test_all_failed() -> None:
    figures = summarise([Outcome([failed(0, 1, "a"), failed(0, 1, "b"), failed(1, 2, "a")], 0)])
    assert figures.errors == {"a": 2, "b": 1}
    body = figures.body()
    assert body["output_tokens_per_second"] == 0 and body["input_tokens"] is None
    assert "ttft_ms" not in body


def test_one_token_has_no_tpot() -> None:
    figures = summarise([Outcome([answered(0.0, 1.0, [])], 0)])
    assert (figures.tpot, figures.itl, figures.output_tokens) == (None, None, 1)


def test_wrong_lengths_are_counted() -> None:
    records = [answered(0, 1, [1.0], expected=2), answered(0, 1, [1.0], expected=3)]
    assert summarise([Outcome(records, 0)]).num_wrong_length == 1


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ({"ttft": 0.3}, 1),
        ({"ttft": 0.5}, 2),
        ({"ttft": 0.5, "tpot": 0.15}, 1),
        ({"itl": 0.25}, 1),
        ({"e2el": 0.55}, 1),
        ({"e2el": 0.1}, 0),
    ],
)
def test_goodput(limits: dict[str, float], good: int) -> None:
    records = [
        answered(0.0, 0.2, [0.1, 0.3]),  # ttft 0.2, tpot 0.2, longest gap 0.3, e2el 0.6
        answered(1.0, 1.4, [0.1]),  # ttft 0.4, tpot 0.1, e2el 0.5
        failed(1.0, 1.1, "http_500"),
    ]
    figures = summarise([Outcome(records, 0)], limits)
    assert figures.good == good
    assert figures.body()["goodput_requests_per_second"] == pytest.approx(good / 1.5, abs=1e-3)


def test_lateness() -> None:
    records = [answered(1.0, 2.0, [1.0]), answered(2.0, 3.0, [1.0])]
    for record, scheduled in zip(records, (0.9, 1.7), strict=True):
        record.scheduled = scheduled
    figures = summarise([Outcome(records, 0)])
    assert figures.lateness is not None and figures.lateness.mean == pytest.approx(200)


@given(st.integers(0, 1000), st.integers(1, 64))
def test_shares_are_a_partition(total: int, parts: int) -> None:
    shares = [share(total, part, parts) for part in range(parts)]
    assert sum(shares) == total and max(shares) - min(shares) <= 1
