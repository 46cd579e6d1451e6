"""The report's plots: what is in them, and where."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from server.bench.html_report import in_flight, token_rate
from server.bench.records import Record
from server.bench.svg_plot import LEFT, RIGHT, WIDTH, Axis, Plot, Series


def test_token_rate_counts_every_token_once() -> None:
    records = [
        Record(0, "ids", 10.0, 12.0, first=11.0, last=12.0, gaps=[0.5, 0.5], num_events=3, completion_tokens=6),
        Record(1, "ids", 10.0, 12.0, error="x", first=11.0, num_events=1),
    ]
    rate = token_rate(records, 10.0, bins=4)
    assert rate == [(0.25, 0.0), (0.75, 0.0), (1.25, 4.0), (1.75, 8.0)]  # 2 tokens at 1.0, 1.5 and 2.0 s


def test_in_flight_is_an_average_over_time() -> None:
    records = [Record(0, "ids", 10.0, 14.0), Record(1, "ids", 11.0, 12.0), Record(2, "ids", 13.5, 14.0)]
    means = [mean for _, mean in in_flight(records, 10.0, bins=4)]
    assert means == pytest.approx([1.0, 2.0, 1.0, 1.5])


def test_axes() -> None:
    axis = Axis.over([1.0, 1000.0], 100, 400, log=True)
    assert [axis.at(value) for value in (1, 10, 100, 1000)] == pytest.approx([100, 200, 300, 400])
    assert axis.ticks() == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
    assert Axis.over([3.0, 48.0], 0, 100, zero=True).ticks() == [0, 10, 20, 30, 40]
    assert (axis.at(0.001), axis.at(1e9)) == (100, 400)


@pytest.mark.parametrize("values", [[], [0.0], [5.0, 5.0], [float("nan")], [1e-12, 1e12]])
@pytest.mark.parametrize("log", [False, True])
def test_odd_values_have_an_axis_too(values: list[float], log: bool) -> None:
    axis = Axis.over(values, 0, 100, log=log)
    assert axis.high > axis.low and len(axis.ticks()) < 60
    assert all(0 <= axis.at(value) <= 100 for value in values if value == value)


def test_a_plot_puts_points_where_they_belong() -> None:
    svg = Plot("t", "x", "y", [Series("<a>", "red", [(0.0, 0.0), (10.0, 5.0)], markers=True)]).svg()
    root = ElementTree.fromstring(svg)  # noqa: S314 - our own
    circles = [(float(each.attrib["cx"]), float(each.attrib["cy"])) for each in root.iter("circle")]
    assert circles[0][0] == LEFT and circles[1][0] == WIDTH - RIGHT
    assert circles[0][1] > circles[1][1]
