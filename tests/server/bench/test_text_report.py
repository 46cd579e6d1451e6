"""What the terminal shows."""

from __future__ import annotations

import io

from server.bench.campaign import Point, Server
from server.bench.http_connection import Target
from server.bench.jobs import Outcome
from server.bench.records import Record
from server.bench.text_report import ProgressLine, table
from server.bench.workers import Progress

SERVER = Server("http://a", Target.parse("http://a"), "m")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def point(*records: Record, cpu_share: float = 0.1) -> Point:
    return Point(SERVER, "concurrency 2", 2, [Outcome(records, cpu_share)] if records else [])


def test_progress_on_a_terminal_is_one_line() -> None:
    out = Terminal()
    line = ProgressLine(out)
    for answered in (1, 2):
        line(point(), 0, 9, Progress(sent=answered + 3, answered=answered, failed=1, tokens=1000 * answered))
    line.clear()
    shown = "http://a concurrency 2, round 1: {}/9 answered, 2 in flight, 1 failed, {} tokens"
    lines = ["", shown.format(2, "1,000"), shown.format(3, "2,000"), ""]
    assert out.getvalue() == "\r\x1b[K".join(lines)


def test_progress_elsewhere_is_a_line_every_ten_seconds() -> None:
    out, now = io.StringIO(), 0.0
    line = ProgressLine(out, clock=lambda: now)
    for now in (0.0, 9.9, 10.0, 15.0, 20.1):
        line(point(), 0, 9, Progress(sent=int(now), answered=0, failed=0, tokens=0))
    line.clear()
    shown = out.getvalue().splitlines()
    assert [text.partition("answered, ")[2] for text in shown] == ["10 in flight, 0 tokens", "20 in flight, 0 tokens"]


def test_a_table_names_errors_and_a_busy_client() -> None:
    answered = Record(0, "ids", 0.0, 2.0, first=1.0, last=2.0, gaps=[1.0], num_events=2, expected_tokens=3)
    failed = Record(1, "ids", 0.0, 1.0, error="http_429", detail="HTTP 429: full")
    shown = table(point(answered, failed, cpu_share=0.93), {"ttft": 1.5})
    assert "requests answered           1 of 2 in 2.00 s" in shown
    assert "output tok/s                1.0" in shown
    assert "answers of another length   1" in shown
    assert "goodput requests/s          0.50 (1 good: ttft ≤ 1500 ms)" in shown
    assert "error http_429 × 1: HTTP 429: full" in shown
    assert "busy 93% of the time" in shown
    assert "busy" not in table(point(answered, cpu_share=0.5), None)
