"""`PromptPace` alone, and the steps that a scheduler makes with it."""

from __future__ import annotations

import pytest

from runner.prompt_pace import PromptPace
from tests.parity.toy_device import ToyEngine, answer
from tests.runner.test_scheduler import entries_of, make_request, prompt


def taken(pace: PromptPace, waiting: float, coming: float, steps: int) -> list[int]:
    """What so many steps take, beside decodes, of prompts that wait and of those that come, rows a step."""
    takes = []
    for _ in range(steps):
        waiting += coming
        takes.append(min(int(waiting), pace.rows(512, int(waiting))))
        waiting -= takes[-1]
        pace.took(takes[-1])
    return takes


def test_what_comes_slowly_is_taken_in_small_steps() -> None:
    takes = taken(PromptPace(1280, 224), 512, 128, 1000)
    assert max(takes) <= 224 + 64  # nowhere near what a step may have
    assert sum(takes) > 128 * 1000 - 1000  # and yet nothing is left waiting


def test_the_pace_rises_until_it_keeps_up_and_falls_again() -> None:
    pace = PromptPace(1280, 224)
    takes = taken(pace, 0, 1000, 1000)
    assert takes[0] == 224 and takes == sorted(takes[:300]) + takes[300:] and max(takes) == 1280
    assert sum(takes) > 1000 * 1000 - 2 * 1280
    assert taken(pace, 0, 0, 200)[-1] == 0 and pace.rows(512, 0) == 224


def test_a_burst_is_taken_at_full_pace_at_once() -> None:
    takes = taken(PromptPace(1280, 224), 200_000, 0, 400)
    assert takes[0] == 1280 and sum(takes) == 200_000
    takes = taken(PromptPace(1280, 224), 16_384, 0, 400)
    assert takes[0] == 224 and max(takes) < 400 and sum(takes) == 16_384


def test_a_long_prompt_is_not_spread_over_more_steps_than_eight() -> None:
    pace = PromptPace(1280, 224)
    assert [pace.rows(first, first) for first in (1, 1792, 4096, 8192, 100_000)] == [224, 224, 512, 1024, 1280]


def test_a_given_size_stays() -> None:
    pace = PromptPace(512)
    for waiting in (0, 10_000):
        taken(pace, waiting, 300, 100)
        assert pace.rows(8192, waiting) == pace.rows(1, 0) == 512
    assert PromptPace(100, 224).rows(1, 0) == 100


def test_only_steps_in_which_others_decode_are_bounded_and_counted() -> None:
    engine = ToyEngine(max_num_batched_tokens=32)
    engine.scheduler.pace = pace = PromptPace(20, 3)
    engine.add(make_request(0, prompt(20), 12))
    assert entries_of(engine) == [(0, 20)]
    engine.retire()
    assert pace.rows(0, 0) == 3
    engine.add(make_request(1, prompt(10, 1)))
    engine.add(make_request(2, prompt(7, 2)))
    chunks: list[int] = []
    while len(chunks) < 4:
        chunks.append(sum(rows for request, rows in entries_of(engine) if request))
        engine.retire()
    assert chunks == [3, 3, 3, 4]  # as everywhere, the last row of a prompt counts as a decode
    assert pace.rows(24, 24) == 3 and pace.rows(160, 160) == 20  # the first prompt's length counts
    engine.run()
    assert engine.tokens[1, 0] == answer(prompt(10, 1), 4)
    engine.assert_empty()


def test_a_scheduler_tells_what_its_steps_took_beside_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.prompt_pace._STEPS", 1)  # only the last step is of late
    engine = ToyEngine(max_num_batched_tokens=32)
    engine.scheduler.pace = pace = PromptPace(20, 4)
    engine.add(make_request(0, prompt(20), 12))
    engine.step()
    assert pace.rows(0, 0) == 4  # a step without decodes is nobody's pace
    engine.add(make_request(1, prompt(28, 1), 2))
    for taken in (4, 5, 6, 8):  # a third as many again each time
        assert entries_of(engine) == [(0, 1), (1, taken)]
        engine.retire()
    engine.run()
    engine.assert_empty()


def test_what_waits_for_a_slot_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.prompt_pace._BACKLOG", 10)
    engine = ToyEngine(max_num_batched_tokens=32)
    engine.scheduler.pace = PromptPace(20, 1)
    engine.add(make_request(0, prompt(3), 20))
    engine.step()
    for number in range(1, 4):
        engine.add(make_request(number, prompt(20, number), 2))
    assert entries_of(engine) == [(0, 1), (1, 6)]  # a tenth of sixty
    engine.retire()
    engine.run()
    engine.assert_empty()


def test_a_long_first_prompt_gets_more_whether_it_waits_or_runs() -> None:
    engine = ToyEngine(max_num_batched_tokens=32)
    engine.scheduler.pace = PromptPace(20, 1)
    engine.add(make_request(0, prompt(3), 20))
    engine.step()
    engine.add(make_request(1, prompt(28, 1)))
    chunks: list[int] = []
    while len(chunks) < 4:
        chunks.append(sum(rows for request, rows in entries_of(engine) if request))
        engine.retire()
    assert chunks == [3, 3, 2, 2]  # an eighth of what it lacks
    engine.run()
    engine.assert_empty()


def test_a_step_may_have_a_little_more_to_fill_its_size() -> None:
    """The pace is no promise to those who decode; `most` is."""
    for most, expected in ((20, 11), (10, 7)):
        engine = ToyEngine(max_num_batched_tokens=32)
        engine.scheduler.pace = PromptPace(most, 9)
        engine.add(make_request(0, prompt(3), 20))
        engine.step()
        engine.scheduler.padded_sizes = [4, 8, 12, 16]
        engine.add(make_request(1, prompt(28, 1), 2))
        assert entries_of(engine) == [(0, 1), (1, expected)]
        engine.retire()
        engine.run()
        engine.assert_empty()
