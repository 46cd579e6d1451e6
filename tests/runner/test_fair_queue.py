"""Whose turn it is: clients share the device, whatever they queue; each one's own requests go as they came."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from runner.fair_queue import FairQueue
from runner.sequence import Request, Sequence
from tests.parity.toy_device import ToyEngine
from tests.runner.test_scheduler import entries_of, make_request, prompt, two_that_need_a_block


def request(
    number: int, client: int = 0, rows: int = 4, max_tokens: int = 4, *, priority: int = 0, n: int = 1
) -> Request:
    made = make_request(number, prompt(rows, number), max_tokens, priority=priority, n=n)
    made.client = client
    return made


def add(queue: FairQueue, made: Request) -> list[Sequence]:
    sequences = Sequence.of_request(made)
    queue.add(sequences)
    return sequences


def serve(queue: FairQueue, count: int) -> list[int]:
    """Gives slots to the next ones, charging their prompts; they end at once. The requests' numbers."""
    numbers = []
    for _ in range(count):
        sequence = queue.first()
        assert sequence is not None
        queue.remove(sequence)
        queue.charge(sequence.request.client, len(sequence.token_ids))
        queue.ended(sequence)
        numbers.append(sequence.request.key[1])
    return numbers


def test_a_thousand_queued_requests_make_nobody_else_wait() -> None:
    queue = FairQueue(3)
    for number in range(1000):
        add(queue, request(number, client=0))
    assert serve(queue, 5) == [0, 1, 2, 3, 4]
    add(queue, request(1000, client=1))
    add(queue, request(1001, client=2))
    assert set(serve(queue, 3)) == {5, 1000, 1001}
    assert serve(queue, 3) == [6, 7, 8]


def test_long_requests_weigh_what_they_cost() -> None:
    queue = FairQueue(2)
    for number in range(0, 100, 2):
        add(queue, request(number, client=0, rows=20))
        add(queue, request(number + 1, client=1, rows=5))
    rows = Counter[int]()
    for number in serve(queue, 50):
        rows[number % 2] += 5 if number % 2 else 20
    assert abs(rows[0] - rows[1]) <= 20


def test_tokens_count_as_rows_do() -> None:
    queue = FairQueue(2)
    first, second = add(queue, request(0, 0)), add(queue, request(1, 1))
    queue.charge_tokens(np.array([0, 0, 1, 0], np.int32))
    assert queue.first() is second[0]
    queue.charge_tokens(np.array([1, 1, 1], np.int32))
    assert queue.first() is first[0]


def test_nobody_saves_up_turns() -> None:
    queue = FairQueue(2)
    for number in range(200):
        add(queue, request(number, client=0))
    serve(queue, 100)  # The other client sends nothing meanwhile.
    for number in range(1000, 1100):
        add(queue, request(number, client=1))
    turns = serve(queue, 20)
    assert sum(number >= 1000 for number in turns) == 10


def test_nobody_is_held_up_for_what_was_taken_while_nobody_wanted_it() -> None:
    queue = FairQueue(2)
    for number in range(100):
        add(queue, request(number, client=0))
    serve(queue, 100)
    assert not queue
    for number in range(10):
        add(queue, request(2000 + number, client=1))
        add(queue, request(1000 + number, client=0))
    assert sum(number < 2000 for number in serve(queue, 10)) == 5


def test_one_client_s_own_requests_go_as_they_came() -> None:
    queue = FairQueue(2)
    for number in range(6):
        add(queue, request(number, client=number % 2, rows=2 + number))
    served = serve(queue, 6)
    assert [number for number in served if number % 2] == [1, 3, 5]
    assert [number for number in served if not number % 2] == [0, 2, 4]


def test_priority_is_before_turns_and_the_preempted_are_before_both() -> None:
    queue = FairQueue(2)
    add(queue, request(0, 0, priority=1))
    queue.charge(1, 1000)
    add(queue, request(1, 1, priority=0))
    (preempted,) = Sequence.of_request(request(2, 1, priority=1))
    queue._open[1] += 1
    queue.put_back(preempted)
    assert serve(queue, 3) == [1, 2, 0]


def test_the_last_preempted_goes_first() -> None:
    """It was admitted before the other one: the newest is preempted first."""
    queue = FairQueue()
    newest, older = (Sequence.of_request(request(number))[0] for number in range(2))
    for sequence in (newest, older):
        queue._open[0] += 1
        queue.put_back(sequence)
    assert serve(queue, 2) == [1, 0]


def test_choices_wait_for_the_one_that_computes_their_prompt() -> None:
    queue = FairQueue(2)
    siblings = add(queue, request(0, 0, n=3))
    other = add(queue, request(1, 1))
    queue.charge(1, 100)
    queue.remove(siblings[0])
    assert queue.first() is other[0]
    siblings[1].waits_for = None
    assert queue.first() is siblings[1]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(1, 3), st.integers(1, 9)), max_size=30))
def test_what_comes_goes(requests: list[tuple[int, int, int, int]]) -> None:
    queue = FairQueue(4)
    waiting = [
        sequence
        for number, (client, priority, n, rows) in enumerate(requests)
        for sequence in add(queue, request(number, client, rows, priority=priority, n=n))
    ]
    assert len(queue) == len(waiting) and set(queue) == set(waiting)
    assert queue.rows == sum(len(sequence.token_ids) for sequence in waiting)
    for sequence in waiting[1::2]:
        queue.remove(sequence)
        queue.put_back(sequence)
    for sequence in waiting:
        queue.remove(sequence)
        queue.ended(sequence)
    assert (len(queue), queue.rows, list(queue), queue.first()) == (0, 0, [], None)
    assert queue._open == [0] * 4 and queue._levels == {} and queue._priorities == []


# --- in the scheduler -----------------------------------------------------------------------------------------------


def test_the_next_slot_goes_to_the_client_that_waits() -> None:
    engine = ToyEngine(num_slots=1, num_clients=2)
    for number in range(20):
        engine.add(request(number, client=0, max_tokens=2))
    entries_of(engine)
    engine.retire()
    engine.add(request(100, client=1, max_tokens=2))
    while (0, 0) not in engine.ends:
        entries_of(engine)
        engine.retire()
    assert entries_of(engine) == [(100, 4)]
    engine.retire()
    engine.run()
    engine.assert_empty()
    assert engine.scheduler.ended_requests == [20, 1]
    assert engine.scheduler.generated_tokens == [40, 2]
    assert engine.scheduler.unqueued_rows == 21 * 4


def test_clients_are_charged_for_rows_and_tokens() -> None:
    engine = ToyEngine(num_slots=2, num_clients=3)
    engine.add(request(0, client=1, rows=6, max_tokens=3))
    engine.add(request(1, client=2, rows=2, max_tokens=5))
    engine.run()
    assert engine.scheduler.waiting._served.tolist() == [0, 6 + 3, 2 + 5]


def test_a_preempted_request_is_not_charged_for_its_second_time() -> None:
    engine = ToyEngine(num_blocks=9, max_num_batched_tokens=32, num_clients=2)
    two_that_need_a_block(engine)
    engine.retire()
    engine.run()
    assert engine.scheduler.preemptions == 1
    rows = sum(engine.scheduler.waiting._served.tolist())
    assert rows == 2 * 16 + sum(map(len, engine.tokens.values()))


def test_aborted_requests_are_accounted_for_once() -> None:
    engine = ToyEngine(num_slots=1, num_clients=2)
    engine.add(request(0, client=1, max_tokens=8, n=2))
    engine.add(request(1, client=1, rows=6))
    entries_of(engine)
    engine.retire()
    engine.abort(1)
    engine.abort(0)
    engine.abort(0)
    engine.run()
    engine.assert_empty()
    assert engine.scheduler.ended_requests == [0, 2]
    assert engine.scheduler.generated_tokens == [0, 1]
    assert engine.scheduler.unqueued_rows == 4 + 6
