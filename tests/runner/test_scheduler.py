"""Schedules, one decision at a time, and then at random on a device that checks every row that it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.messages import DIGEST_BYTES, EMBEDDING_ID, Generate, SamplingParams, Span
from runner.scheduler import Scheduler
from runner.sequence import Request
from tests.parity.toy_device import VOCAB_SIZE, ToyEngine, answer

Row = int | bytes
"""A token id, or an embedding's bytes: one."""


def make_request(
    number: int, rows: list[Row], max_tokens: int = 4, *, n: int = 1, salt: str = "", priority: int = 0,
    private: bool = False, max_model_len: int = 32, **sampling: Any,
) -> Request:  # fmt: skip
    ids = np.array([row if isinstance(row, int) else EMBEDDING_ID for row in rows], np.int32)
    embeddings = [(place, row) for place, row in enumerate(rows) if isinstance(row, bytes)]
    message = Generate(
        0,
        number,
        n,
        SamplingParams(max_tokens, **sampling),
        tuple(Span(place, 1) for place, _ in embeddings),
        salt,
        priority,
    )
    frames = [ids.tobytes(), b"".join(row * DIGEST_BYTES for _, row in embeddings), *(row for _, row in embeddings)]
    return Request.from_message(
        message,
        [memoryview(frame) for frame in frames],
        vocab_size=VOCAB_SIZE,
        row_size=1,
        max_model_len=max_model_len,
        block_size=4,
        private_cache=private,
    )


def prompt(length: int, seed: int = 0) -> list[Row]:
    return [(7 * i * i + 3 * i + seed) % VOCAB_SIZE for i in range(length)]


def entries_of(engine: ToyEngine) -> list[tuple[int, int]]:
    """Launches the next step: (request, rows) of its entries, in order."""
    step = engine.schedule()
    assert step is not None
    return [(s.request.key[1], int(rows)) for s, rows in zip(step.sequences, np.diff(step.starts), strict=True)]


# --- the token budget -----------------------------------------------------------------------------------------------


def test_decodes_come_first_and_prompts_share_the_rest_in_order() -> None:
    engine = ToyEngine(max_num_batched_tokens=8)
    engine.add(make_request(0, prompt(3)))
    assert entries_of(engine) == [(0, 3)]
    engine.retire()
    engine.add(make_request(1, prompt(12, 1)))
    engine.add(make_request(2, prompt(3, 2)))
    assert entries_of(engine) == [(0, 1), (1, 7)]
    engine.retire()
    # What is left of the older prompt, then as much of the next one as fits.
    assert entries_of(engine) == [(0, 1), (1, 5), (2, 2)]
    engine.retire()
    # The last row of a prompt is as good as a decode.
    assert entries_of(engine) == [(0, 1), (1, 1), (2, 1)]
    engine.retire()
    engine.run()
    for number, length in enumerate((3, 12, 3)):
        assert engine.tokens[number, 0] == answer(prompt(length, number), 4)
    engine.assert_empty()


def test_prompts_take_smaller_chunks_while_others_decode() -> None:
    engine = ToyEngine(max_num_batched_tokens=16, chunked_prefill_size=3)
    engine.add(make_request(0, prompt(10)))
    assert entries_of(engine) == [(0, 10)]
    engine.retire()
    engine.add(make_request(1, prompt(7, 1)))
    engine.add(make_request(2, prompt(7, 2)))
    # As everywhere, the last row of a prompt counts as a decode.
    for expected in ([(0, 1), (1, 3)], [(0, 1), (1, 3)], [(0, 1), (1, 1), (2, 3)]):
        assert entries_of(engine) == expected
        engine.retire()
    engine.run()
    for number, length in enumerate((10, 7, 7)):
        assert engine.tokens[number, 0] == answer(prompt(length, number), 4)
    engine.assert_empty()


@pytest.mark.parametrize(
    "sizes, waiting, expected",
    [
        ([], 20, 9),
        ([4, 8, 16], 20, 7),  # more is waiting than the step may have: it fills the size below
        ([4, 8, 16], 7, 7),
        ([4, 8, 10, 16], 20, 9),
        ([4, 8, 11, 16], 8, 8),  # two rows of padding cost less than a step more
        ([4, 8, 11, 16], 20, 7),  # but where more is waiting, that step comes anyway
        ([4, 8, 16], 8, 7),  # seven rows of padding do not
        ([2, 16], 20, 9),  # one row of a prompt a step would get it nowhere
        ([16], 20, 9),
        ([2, 4], 20, 9),
    ],
)
def test_a_step_fills_a_size_that_it_would_be_padded_to(
    sizes: list[int], waiting: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.prompt_pace._SMALL_PADDING", 2)
    engine = ToyEngine(max_num_batched_tokens=32, chunked_prefill_size=9)
    engine.add(make_request(0, prompt(3), 20))
    assert entries_of(engine) == [(0, 3)]
    engine.retire()
    engine.scheduler.padded_sizes = sizes
    engine.add(make_request(1, prompt(waiting, 1), 2))
    assert entries_of(engine) == [(0, 1), (1, expected)]
    engine.retire()
    engine.run()
    assert engine.tokens[1, 0] == answer(prompt(waiting, 1), 2)
    engine.assert_empty()


def test_the_budget_has_a_row_for_every_slot() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens is too small"):
        ToyEngine(num_slots=5, max_num_batched_tokens=4)


def test_a_step_admits_no_more_rows_than_its_upload_has_room_for() -> None:
    engine = ToyEngine(max_num_batched_tokens=16, max_admitted_rows=8)
    for number in range(3):
        engine.add(make_request(number, prompt(4, number)))
    assert entries_of(engine) == [(0, 4), (1, 4)]
    engine.retire()
    assert entries_of(engine) == [(0, 1), (1, 1), (2, 4)]


def test_nothing_to_do() -> None:
    engine = ToyEngine()
    assert engine.schedule() is None
    assert not engine.scheduler.has_work


# --- admission ------------------------------------------------------------------------------------------------------


def test_first_come_first_served() -> None:
    """A short prompt that would fit does not overtake a long one that doesn't."""
    engine = ToyEngine(num_blocks=9)  # 8 blocks of 4 rows
    for number, length in enumerate((14, 20, 3)):
        engine.add(make_request(number, prompt(length, number)))
    assert entries_of(engine) == [(0, 14)]
    engine.retire()
    assert entries_of(engine) == [(0, 1)]
    engine.retire()
    engine.run()
    assert engine.scheduler.preemptions == 0
    assert list(engine.ends) == [(0, 0), (2, 0), (1, 0)] or list(engine.ends) == [(0, 0), (1, 0), (2, 0)]


def test_slots_are_the_limit() -> None:
    engine = ToyEngine(num_slots=2)
    for number in range(3):
        engine.add(make_request(number, prompt(4, number)))
    assert entries_of(engine) == [(0, 4), (1, 4)]
    assert engine.scheduler.num_running == 2
    assert len(engine.scheduler.waiting) == 1


def test_large_pools_keep_a_little_room() -> None:
    """A hundredth of the pool stays free while others run, and is nobody's privilege when nothing does."""
    engine = ToyEngine(num_blocks=201, num_slots=60, max_num_batched_tokens=1000, max_admitted_rows=2000)
    for number in range(60):
        engine.add(make_request(number, prompt(15, number)))
    engine.schedule()
    assert engine.scheduler.pool.num_free in range(2, 6)


def test_cached_blocks_are_not_computed_again() -> None:
    engine = ToyEngine()
    engine.add(make_request(0, prompt(10)))
    engine.run()
    engine.add(make_request(1, prompt(10)))
    assert entries_of(engine) == [(1, 2)]
    engine.retire()
    assert (engine.scheduler.prefix_queries, engine.scheduler.prefix_hits) == (20, 8)
    engine.run()
    assert engine.tokens[1, 0] == answer(prompt(10), 4)


# --- preemption -----------------------------------------------------------------------------------------------------


def two_that_need_a_block(engine: ToyEngine) -> None:
    """8 blocks, two prompts of four whole blocks each: the first decode of each lacks one."""
    engine.add(make_request(0, prompt(16, 0), 8))
    engine.add(make_request(1, prompt(16, 1), 8))
    assert entries_of(engine) == [(0, 16), (1, 16)]


def test_the_newest_makes_room_and_keeps_its_tokens() -> None:
    engine = ToyEngine(num_blocks=9, max_num_batched_tokens=32)
    two_that_need_a_block(engine)
    engine.retire()
    assert engine.tokens[1, 0] == answer(prompt(16, 1), 1)
    assert entries_of(engine) == [(0, 1)]
    engine.retire()
    assert engine.scheduler.preemptions == 1
    (waiting,) = engine.scheduler.waiting
    assert waiting.token_ids.tolist() == prompt(16, 1) + answer(prompt(16, 1), 1)
    engine.run()
    for number in (0, 1):
        assert engine.tokens[number, 0] == answer(prompt(16, number), 8)
    engine.assert_empty()


def test_where_nothing_is_cached_the_preempted_find_their_own_rows_again() -> None:
    engine = ToyEngine(num_blocks=12, max_num_batched_tokens=32)
    engine.add(make_request(0, prompt(16, 0), 8, private=True))
    engine.add(make_request(1, prompt(16, 1), 16, private=True))
    while not engine.scheduler.preemptions:
        engine.step()
    assert engine.scheduler.prefix_hits == 0
    engine.run()
    assert engine.scheduler.prefix_hits > 0
    for number, count in ((0, 8), (1, 16)):
        assert engine.tokens[number, 0] == answer(prompt(16, number), count)
    # Nobody else does, and nothing of theirs is kept once they have ended.
    engine.add(make_request(2, prompt(16, 0), 1, private=True))
    hits = engine.scheduler.prefix_hits
    engine.run()
    assert engine.scheduler.prefix_hits == hits
    engine.assert_empty()


def test_where_nothing_is_cached_no_step_offers_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, offered = ToyEngine(max_model_len=64), list[int]()
    publish = engine.scheduler._publish

    def count(slots: list[int], computed: list[int]) -> None:
        offered.extend(slots)
        publish(slots, computed)

    monkeypatch.setattr(engine.scheduler, "_publish", count)
    engine.add(make_request(0, prompt(5), 59, max_model_len=64, private=True))
    engine.run()
    assert len(offered) == 2  # with its prompt's step, and when it gives back what it holds
    assert engine.scheduler.pool.num_cached == 0


def test_a_long_answer_is_cached_while_it_is_made() -> None:
    engine = ToyEngine(num_blocks=60, max_model_len=64)
    engine.add(make_request(0, prompt(5), 59, max_model_len=64))
    while engine.scheduler.table.known[0] < 50:
        engine.step()
    engine.add(make_request(1, [*prompt(5), *answer(prompt(5), 40)], 1, max_model_len=64))
    engine.step()
    assert engine.scheduler.prefix_hits >= 32
    engine.run()
    assert engine.tokens[1, 0] == answer([*prompt(5), *answer(prompt(5), 40)], 1)


def test_nobody_is_preempted_while_a_step_is_in_flight() -> None:
    """The step in flight is taken in first: a preempted sequence never has a token on its way."""
    engine = ToyEngine(num_blocks=9, max_num_batched_tokens=32, overlap=True)
    two_that_need_a_block(engine)
    assert engine.schedule() is None
    assert engine.scheduler.preemptions == 0
    engine.retire()
    assert entries_of(engine) == [(0, 1)]
    assert engine.scheduler.preemptions == 1


def test_what_retires_may_make_room() -> None:
    """Then nobody is preempted at all."""
    engine = ToyEngine(num_blocks=9, max_num_batched_tokens=32, overlap=True)
    engine.add(make_request(0, prompt(16, 0), 8))
    engine.add(make_request(1, prompt(16, 1), 8, stop_token_ids=tuple(answer(prompt(16, 1), 1))))
    assert entries_of(engine) == [(0, 16), (1, 16)]
    assert engine.schedule() is None
    engine.retire()
    assert engine.ends == {(1, 0): "stop"}
    assert entries_of(engine) == [(0, 1)]
    assert engine.scheduler.preemptions == 0


def test_lower_priorities_are_admitted_first_and_equal_ones_as_they_came() -> None:
    engine = ToyEngine(num_slots=1)
    for number, priority in enumerate((0, 5, -1, 5, -1, 2**63 - 1, 0, -(2**63))):
        engine.add(make_request(number, prompt(3, number), 1, priority=priority))
    order = []
    while engine.scheduler.waiting:
        order.append(entries_of(engine)[0][0])
        engine.retire()
    assert order == [7, 2, 4, 0, 6, 1, 3, 5]
    engine.assert_empty()


def test_the_lowest_priority_is_preempted_and_waits_before_its_equals_only() -> None:
    """Not the newest: that one is more urgent."""
    engine = ToyEngine(num_blocks=5, num_slots=2)
    engine.add(make_request(0, prompt(7), 3, priority=1))
    entries_of(engine)
    engine.retire()
    engine.add(make_request(1, prompt(7, 1), 9))
    engine.add(make_request(2, prompt(2, 2), 1, priority=1))
    engine.add(make_request(3, prompt(2, 3), 1))
    while not engine.scheduler.preemptions:
        entries_of(engine)
        engine.retire()
    running = [s.request.key[1] for s in engine.scheduler.table.sequences if s is not None]
    waiting = [s.request.key[1] for s in engine.scheduler.waiting]
    assert 1 in running and 0 not in running
    assert waiting.index(0) < waiting.index(2)
    assert 3 not in waiting[waiting.index(0) :]
    engine.run()
    for number, length, count in ((0, 7, 3), (1, 7, 9), (2, 2, 1), (3, 2, 1)):
        assert engine.tokens[number, 0] == answer(prompt(length, number), count)


def test_a_preempted_sequence_goes_before_those_that_never_ran() -> None:
    engine = ToyEngine(num_blocks=9, max_num_batched_tokens=32)
    two_that_need_a_block(engine)
    engine.add(make_request(2, prompt(16, 2), 8))
    engine.retire()
    engine.run()
    assert list(engine.ends) == [(0, 0), (1, 0), (2, 0)]


# --- ends -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
def test_a_known_end_is_not_overrun(overlap: bool) -> None:
    engine = ToyEngine(overlap=overlap)
    engine.add(make_request(0, prompt(5), 3))
    rows = 0
    while engine.scheduler.has_work:
        step = engine.schedule()
        rows += step.num_rows if step else 0
        if engine.launched and (step is None or len(engine.launched) > engine.depth):
            engine.retire()
    # The last token is never an input.
    assert rows == 5 + 2
    assert engine.tokens[0, 0] == answer(prompt(5), 3)
    assert engine.ends == {(0, 0): "length"}


def test_a_surprising_end_costs_one_row_and_frees_a_step_later() -> None:
    engine = ToyEngine(overlap=True)
    stop = answer(prompt(5), 1)
    engine.add(make_request(0, prompt(5), 8, stop_token_ids=tuple(stop)))
    engine.schedule()
    engine.schedule()  # The row of a token that the host does not know yet.
    engine.retire()
    assert engine.ends == {(0, 0): "stop"}
    assert engine.tokens[0, 0] == stop
    # The step in flight still reads them.
    assert engine.scheduler.num_running == 1
    assert engine.scheduler.pool.num_used == 2
    assert engine.schedule() is None
    engine.retire()
    assert engine.tokens[0, 0] == stop
    engine.assert_empty()


def test_a_stop_token_at_the_limit_is_a_stop() -> None:
    engine = ToyEngine()
    tokens = answer(prompt(5), 1)
    engine.add(make_request(0, prompt(5), 1, stop_token_ids=tuple(tokens)))
    engine.run()
    assert engine.ends == {(0, 0): "stop"}


def test_any_number_of_stop_tokens() -> None:
    """More than there is room for at first; those of an earlier owner of the slot are gone."""
    engine = ToyEngine(num_slots=1)
    tokens = answer(prompt(5), 4)
    others = tuple(token for token in range(VOCAB_SIZE) if token not in tokens)
    assert others
    engine.add(make_request(0, prompt(5), 4, stop_token_ids=tuple(reversed(range(VOCAB_SIZE)))))
    engine.add(make_request(1, prompt(5), 4, stop_token_ids=others))
    engine.add(make_request(2, prompt(5), 4))
    engine.run()
    assert engine.ends == {(0, 0): "stop", (1, 0): "length", (2, 0): "length"}
    assert engine.tokens[0, 0] == tokens[:1]
    table = engine.scheduler.table
    assert len(table.stop_ids) == VOCAB_SIZE and table._most_stop_ids == 0


def test_scoring_makes_no_token() -> None:
    engine = ToyEngine(max_num_batched_tokens=4)
    engine.add(make_request(0, prompt(9), 0, prompt_logprobs=0))
    engine.add(make_request(1, prompt(1), 0, prompt_logprobs=0))
    engine.run()
    assert engine.scored == {0: list(range(1, 9))}
    assert engine.tokens == {}
    assert engine.ends == {(0, 0): "length", (1, 0): "length"}
    engine.assert_empty()


def test_a_scored_prompt_is_not_looked_up() -> None:
    engine = ToyEngine()
    for number in range(2):
        engine.add(make_request(number, prompt(9), 2, prompt_logprobs=0))
        engine.run()
    assert (engine.scheduler.prefix_queries, engine.scheduler.prefix_hits) == (0, 0)


# --- aborts ---------------------------------------------------------------------------------------------------------


def test_abort_in_the_queue() -> None:
    engine = ToyEngine(num_slots=1)
    engine.add(make_request(0, prompt(5)))
    engine.schedule()
    engine.add(make_request(1, prompt(5, 1), n=2))
    engine.abort(1)
    assert not engine.scheduler.waiting
    assert (0, 1) not in engine.scheduler.requests
    engine.retire()
    engine.run()
    assert list(engine.ends) == [(0, 0)]


def test_abort_between_steps_frees_at_once() -> None:
    engine = ToyEngine()
    engine.add(make_request(0, prompt(5)))
    engine.schedule()
    engine.retire()
    engine.abort(0)
    engine.assert_empty()


def test_abort_in_flight_frees_when_the_step_retires() -> None:
    engine = ToyEngine(overlap=True)
    engine.add(make_request(0, prompt(5), 8))
    engine.schedule()
    engine.schedule()
    engine.abort(0)
    assert engine.scheduler.num_running == 1
    assert engine.schedule() is None
    engine.retire()
    assert engine.scheduler.num_running == 1
    engine.retire()
    assert engine.tokens == {} and engine.ends == {}
    engine.assert_empty()


def test_a_row_whose_id_never_arrived_is_not_cached() -> None:
    """The step that sampled it was dropped, the one that computed it had been launched already."""
    engine = ToyEngine(overlap=True)
    assert answer(prompt(3), 1) != [0]
    engine.add(make_request(0, prompt(3), 8))
    engine.schedule()
    engine.schedule()
    engine.abort(0)
    engine.retire()
    engine.retire()
    engine.add(make_request(1, [*prompt(3), 0, 1], 1))
    engine.run()
    assert engine.scheduler.prefix_hits == 0
    assert engine.tokens[1, 0] == answer([*prompt(3), 0, 1], 1)


def test_abort_of_one_choice() -> None:
    engine = ToyEngine()
    engine.add(make_request(0, prompt(5), 4, n=3))
    for _ in range(3):
        engine.step()
    engine.abort(0, 1)
    engine.run()
    assert set(engine.ends) == {(0, 0), (0, 2)}
    engine.assert_empty()


def test_abort_of_what_is_not_there() -> None:
    engine = ToyEngine()
    engine.abort(7)
    engine.add(make_request(0, prompt(5), n=2))
    engine.abort(0, 5)
    engine.run()
    engine.abort(0)
    assert set(engine.ends) == {(0, 0), (0, 1)}


# --- siblings -------------------------------------------------------------------------------------------------------


def test_siblings_start_when_the_first_has_the_prompt() -> None:
    engine = ToyEngine(max_num_batched_tokens=8)
    engine.add(make_request(0, prompt(13), 4, n=3))
    engine.add(make_request(1, prompt(2, 5)))
    # Who comes later needs not wait for them.
    assert entries_of(engine) == [(0, 8)]
    engine.retire()
    assert entries_of(engine) == [(0, 5), (1, 2)]
    engine.retire()
    # Twelve rows are cached.
    assert sorted(entries_of(engine)) == [(0, 1), (0, 1), (0, 1), (1, 1)]
    engine.retire()
    engine.run()
    assert all(engine.tokens[0, choice] == answer(prompt(13), 4) for choice in range(3))


def test_siblings_of_an_aborted_first_go_on() -> None:
    engine = ToyEngine(max_num_batched_tokens=8)
    engine.add(make_request(0, prompt(13), 4, n=3))
    engine.schedule()
    engine.abort(0, 0)
    engine.retire()
    engine.run()
    assert set(engine.ends) == {(0, 1), (0, 2)}
    assert engine.tokens[0, 1] == engine.tokens[0, 2] == answer(prompt(13), 4)


# --- at random ------------------------------------------------------------------------------------------------------


@dataclass
class Planned:
    rows: list[Row]
    max_tokens: int
    n: int
    stop: set[int]
    salt: str
    scored: bool
    arrival: int
    abort: tuple[int, int] | None
    """(before which step, which choice)"""


# Few contents, so that prompts have prefixes in common, and their answers too.
PREFIXES: list[list[Row]] = [[1, 2, 3, 4, 5, 6, 0, 1, 2], [1, 2, b"a", b"b", 5, 6, 0, 1, 2], [b"a"] * 9]
rows_of_prompts = st.builds(
    lambda prefix, cut, rest: (prefix[:cut] + rest) or [0],
    st.sampled_from(PREFIXES),
    st.integers(0, 9),
    st.lists(st.integers(0, 2) | st.sampled_from([b"a", b"b"]), max_size=6),
)
plans = st.builds(
    Planned,
    rows=rows_of_prompts,
    max_tokens=st.integers(1, 14),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    stop=st.sets(st.integers(0, VOCAB_SIZE - 1), max_size=1),
    salt=st.sampled_from(["", "", "tenant"]),
    scored=st.sampled_from([False, False, False, True]),
    arrival=st.integers(0, 25),
    abort=st.none() | st.none() | st.tuples(st.integers(0, 40), st.integers(-1, 2)),
)


@pytest.mark.fuzz
@pytest.mark.timeout(1800)  # with --long
@given(
    planned=st.lists(plans, min_size=1, max_size=12),
    overlap=st.booleans(),
    num_slots=st.integers(1, 6),
    spare_blocks=st.sampled_from([0, 0, 3, 30]),
    budget=st.sampled_from([6, 9, 40]),
)
def test_any_schedule_gives_every_sequence_its_own_rows(
    planned: list[Planned], overlap: bool, num_slots: int, spare_blocks: int, budget: int
) -> None:
    engine = ToyEngine(overlap=overlap, num_slots=num_slots, num_blocks=9 + spare_blocks, max_num_batched_tokens=budget)
    step = 0
    while engine.scheduler.has_work or step <= 25:
        for number, plan in enumerate(planned):
            if plan.arrival == step:
                sampling: dict[str, Any] = {"stop_token_ids": tuple(plan.stop)}
                if plan.scored:
                    sampling["prompt_logprobs"] = 0
                engine.add(make_request(number, plan.rows, plan.max_tokens, n=plan.n, salt=plan.salt, **sampling))
            if plan.abort is not None and plan.abort[0] == step:
                engine.abort(number, plan.abort[1])
        engine.step()
        step += 1
        assert step < 3000
    for number, plan in enumerate(planned):
        expected = answer(plan.rows, plan.max_tokens)
        stops = [i for i, token in enumerate(expected) if token in plan.stop]
        expected = expected[: stops[0] + 1] if stops else expected
        for key in ((number, choice) for choice in range(plan.n)):
            if key in engine.aborted:
                sent = engine.tokens.get(key, [])
                assert sent == expected[: len(sent)] and key not in engine.ends
            else:
                assert engine.tokens[key] == expected
                assert engine.ends[key] == ("stop" if stops else "length")
        scores = engine.scored.get(number, [])
        if not plan.scored:
            assert scores == []
        elif (number, 0) not in engine.aborted:
            assert scores == list(range(1, len(plan.rows)))
    engine.assert_empty()


def test_the_toy_device_notices_a_wrong_block() -> None:
    """The control."""
    engine = ToyEngine(num_blocks=33)
    engine.add(make_request(0, prompt(9, 0)))
    engine.add(make_request(1, prompt(6, 1)))
    step = engine.schedule()
    assert step is not None
    engine.launched[0].admitted[1][1].blocks[0] = engine.launched[0].admitted[0][1].blocks[0]
    with pytest.raises(AssertionError, match="another sequence's row"):
        engine.retire()


def test_the_scheduler_says_what_it_lacks() -> None:
    with pytest.raises(ValueError, match="at least 2 blocks"):
        Scheduler(
            num_slots=1,
            num_blocks=1,
            block_size=4,
            max_model_len=8,
            max_num_batched_tokens=4,
            max_admitted_rows=8,
        )
