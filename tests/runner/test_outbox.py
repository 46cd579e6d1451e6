"""A step's tokens, divided among those who wait for them."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from runner.messages import StepOutput, TokenLogprobs
from runner.outbox import Addresses, Outbox
from runner.slot_table import SlotTable

SLOTS = 16


def table_of(workers: list[int]) -> SlotTable:
    """Slot i is worker `workers[i]`'s; request 1000 + i, choice i % 3."""
    table = SlotTable(SLOTS, 8, 4)
    table.worker[: len(workers)] = workers
    table.request[:] = 1000 + np.arange(SLOTS)
    table.choice[:] = np.arange(SLOTS) % 3
    return table


def sent(outbox: Outbox) -> dict[int, StepOutput]:
    found: dict[int, StepOutput] = {}

    def emit(worker: int, output: StepOutput) -> None:
        assert worker not in found, "more than one message"
        found[worker] = output

    outbox.send(emit)
    return found


@given(
    workers=st.lists(st.integers(0, 3), min_size=SLOTS, max_size=SLOTS),
    slots=st.permutations(range(SLOTS)),
    count=st.integers(0, SLOTS),
    data=st.data(),
)
def test_each_token_reaches_whom_it_is_for(workers: list[int], slots: list[int], count: int, data: Any) -> None:
    taken = np.array(slots[:count], np.intp)
    addresses = Addresses(table_of(workers), taken)
    tokens = np.arange(count, dtype=np.int64) + 50_000
    # The same addresses serve several steps, in some of which not every entry has a token.
    for _ in range(3):
        entries = np.array(sorted(data.draw(st.sets(st.integers(0, count - 1)) if count else st.just(set()))), np.intp)
        outbox = Outbox()
        outbox.add_tokens(addresses.of(entries), tokens)
        found = sent(outbox)
        expected = {(workers[slots[e]], 1000 + slots[e], slots[e] % 3, 50_000 + e) for e in entries.tolist()}
        assert expected == {
            (worker, *each)
            for worker, output in found.items()
            for each in zip(output.requests, output.choices, output.tokens, strict=True)
        }
        assert all(output.tokens and not output.logprobs for output in found.values())


def test_slots_that_are_given_away_change_nothing() -> None:
    table = table_of([0, 1])
    addresses = Addresses(table, np.array([0, 1]))
    table.worker[:], table.request[:] = 9, 9
    outbox = Outbox()
    outbox.add_tokens(addresses.of(np.array([0, 1])), np.array([5, 6]))
    assert {worker: output.requests for worker, output in sent(outbox).items()} == {0: [1000], 1: [1001]}


def test_log_probabilities_lie_beside_their_tokens() -> None:
    entry = TokenLogprobs(6, -0.5, 1, (), ())
    outbox = Outbox()
    shares = Addresses(table_of([1, 0, 1]), np.array([0, 1, 2])).of(np.arange(3))
    outbox.add_tokens(shares, np.array([5, 7, 6]), {2: entry})
    found = sent(outbox)
    assert (found[1].tokens, found[1].logprobs) == ([5, 6], [None, entry])
    assert (found[0].tokens, found[0].logprobs) == ([7], [None])


def test_what_is_added_to_a_message_stays_in_it() -> None:
    """The lists of requests are the same for many steps, the messages' own are not."""
    addresses, sizes = Addresses(table_of([0, 0]), np.array([0, 1])), []
    for _ in range(2):
        outbox = Outbox()
        outbox.add_tokens(addresses.of(np.arange(2)), np.array([5, 6]))
        outbox.of(0).requests.append(7)
        sizes.append(len(sent(outbox)[0].requests))
    assert sizes == [3, 3]
