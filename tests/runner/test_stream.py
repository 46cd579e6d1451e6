"""The CPU's stream defers its work to the last moment, so that a missing wait shows."""

from __future__ import annotations

import pytest
import torch

from runner.stream import DeferredStream, make_stream


def test_the_cpu_has_the_deferred_one() -> None:
    assert isinstance(make_stream(torch.device("cpu")), DeferredStream)


def test_nothing_runs_before_it_is_waited_for() -> None:
    done: list[int] = []
    stream = DeferredStream()
    stream.run(lambda: done.append(1))
    event = stream.record()
    assert done == []
    event.wait()
    assert done == [1]


def test_a_wait_does_what_was_handed_over_before_it_and_no_more() -> None:
    done: list[int] = []
    stream = DeferredStream()
    events = []
    for i in range(4):
        stream.run(lambda i=i: done.append(i))  # type: ignore[misc]
        events.append(stream.record())
    events[1].wait()
    assert done == [0, 1]
    events[0].wait()
    events[1].wait()
    assert done == [0, 1]
    events[3].wait()
    assert done == [0, 1, 2, 3]


def test_an_event_before_any_work_is_done() -> None:
    done: list[int] = []
    stream = DeferredStream()
    event = stream.record()
    stream.run(lambda: done.append(1))
    event.wait()
    assert done == []


def test_an_event_serves_once_more_when_it_has_been_waited_for() -> None:
    done: list[int] = []
    stream = DeferredStream()
    stream.run(lambda: done.append(1))
    event = stream.record()
    with pytest.raises(RuntimeError, match="before it has been waited for"):
        stream.record(event)
    event.wait()
    stream.run(lambda: done.append(2))
    assert stream.record(event) is event
    event.wait()
    assert done == [1, 2]


def test_work_sees_its_buffers_as_they_are_when_it_runs() -> None:
    """What goes wrong where a staging buffer is rewritten too early."""
    buffer, landed = torch.zeros(1), torch.zeros(1)
    stream = DeferredStream()

    def work() -> None:
        landed.copy_(buffer)

    stream.run(work)
    event = stream.record()
    buffer.fill_(5)
    event.wait()
    assert landed.item() == 5


def test_a_failing_step_does_not_run_twice() -> None:
    runs: list[int] = []

    def fail() -> None:
        runs.append(1)
        raise RuntimeError("out of memory")

    stream = DeferredStream()
    stream.run(fail)
    event = stream.record()
    for _ in range(2):
        try:
            event.wait()
        except RuntimeError as error:
            assert str(error) == "out of memory"
    assert runs == [1]
