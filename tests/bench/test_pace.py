"""Simulated time, where it can be reckoned by hand: every step takes a millisecond."""

from __future__ import annotations

import pytest

from runner.prompt_pace import PromptPace
from tests.bench.pace import SHAPES, Load, Outcome, Shape, Simulation

EVEN = Shape(
    decodes={1: 1.0, 256: 1.0}, mixed={128: 1.0, 8192: 1.0}, decode_attention=0.0, prompt_attention=0.0, beside=0.0,
    prompts=0.0, most=8192, least=8192, turn_ms=5.0,
)  # fmt: skip


def test_one_after_another() -> None:
    outcome = Simulation(EVEN, Load(3, 10, 4, concurrency=1), PromptPace(8192)).run()
    assert outcome == Outcome(took=12.0 + 2 * 5.0, ttfts=[1.0] * 3, gaps=[1.0] * 9, tokens=12, steps=12)


def test_a_prompt_beside_a_decode_is_taken_at_the_pace_and_a_step_later() -> None:
    """The second comes after 6 ms: the next step is launched already, and ten of ten rows follow."""
    outcome = Simulation(EVEN, Load(2, 100, 50, concurrency=2), PromptPace(10)).run()
    assert outcome.ttfts == [1.0, 11.0]


def test_requests_at_a_rate() -> None:
    outcome = Simulation(EVEN, Load(2000, 10, 1, request_rate=100.0), PromptPace(8192)).run()
    assert outcome.tokens == 2000
    assert outcome.took == pytest.approx(20_000, rel=0.1)


def test_what_a_step_takes_grows_with_its_rows() -> None:
    for shape in SHAPES.values():
        for table in (shape.decodes, shape.mixed):
            times = [table[rows] for rows in sorted(table)]
            assert times == sorted(times)
