"""Who may join the queue: its bounds, and each client's."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from runner.admission import Admission, Refusal, TokenBucket
from runner.config import ClientLimits, RunnerConfig
from runner.sequence import Request
from tests.runner.test_scheduler import Row, make_request, prompt


@dataclass
class Engine:
    ended_sequences: int = 0
    released_row_bytes: int = 0
    unqueued_rows: int = 0
    ended_requests: list[int] = field(default_factory=lambda: [0, 0])
    generated_tokens: list[int] = field(default_factory=lambda: [0, 0])


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Gate:
    """An admission that lets in whom it may. Slots: 2."""

    def __init__(self, **config: object) -> None:
        self.clock = Clock()
        self.engine = Engine()
        self.admission = Admission(RunnerConfig(**config), self.clock)  # type: ignore[arg-type]

    def ask(self, rows: int = 4, *, client: int = 0, n: int = 1, embeddings: int = 0) -> Refusal | None:
        parts: list[Row] = [*prompt(rows), *[b"e"] * embeddings]
        request: Request = make_request(0, parts, n=n)
        request.client = client
        refusal = self.admission.refusal(request, self.engine, 2)
        if refusal is None:
            self.admission.accept(request)
        return refusal

    def reason(self, rows: int = 4, **options: int) -> str:
        refusal = self.ask(rows, **options)
        return "" if refusal is None else refusal.reason


def test_the_queue_is_bounded_in_choices() -> None:
    gate = Gate(max_queue=3)
    assert [gate.reason() for _ in range(6)] == ["", "", "", "", "", "queue_full"]
    gate.engine.ended_sequences = 1
    assert [gate.reason(n=2), gate.reason()] == ["", "queue_full"]


def test_the_queue_is_bounded_in_prompt_rows() -> None:
    gate = Gate(max_queued_tokens=20)
    assert [gate.reason(rows) for rows in (12, 8, 1)] == ["", "", "tokens_full"]
    gate.engine.unqueued_rows = 12
    assert [gate.reason(rows) for rows in (12, 1)] == ["", "tokens_full"]


def test_a_prompt_longer_than_the_queue_may_wait_alone() -> None:
    gate = Gate(max_queued_tokens=5)
    assert [gate.reason(9), gate.reason(1)] == ["", "tokens_full"]
    gate.engine.unqueued_rows = 9
    assert gate.reason(9) == ""


def test_embeddings_are_bounded_in_bytes() -> None:
    gate = Gate(max_row_bytes=5)
    assert [gate.reason(embeddings=3), gate.reason(embeddings=3)] == ["", "rows_full"]
    assert gate.reason() == "", "it has none"
    gate.engine.released_row_bytes = 3
    assert gate.reason(embeddings=5) == ""


def test_a_client_is_bounded_in_requests_at_once() -> None:
    gate = Gate(clients=(ClientLimits(concurrency=2), ClientLimits()))
    assert [gate.reason(n=4), gate.reason(), gate.reason(), gate.reason(client=1)] == ["", "", "concurrency", ""]
    gate.engine.ended_requests = [1, 1]
    assert [gate.reason(), gate.reason()] == ["", "concurrency"]


def test_a_client_is_bounded_in_requests_a_minute() -> None:
    gate = Gate(clients=(ClientLimits(requests_per_minute=6), ClientLimits()))
    assert [gate.reason() for _ in range(7)] == [""] * 6 + ["rate_limit"]
    refusal = gate.ask()
    assert refusal is not None and refusal.retry_after == pytest.approx(10)
    gate.clock.now += 9.9
    assert gate.reason() == "rate_limit"
    gate.clock.now += 0.2
    assert [gate.reason(), gate.reason()] == ["", "rate_limit"]
    gate.clock.now += 3600
    assert [gate.reason() for _ in range(7)] == [""] * 6 + ["rate_limit"], "no more than a minute is saved up"
    assert gate.reason(client=1) == ""


def test_a_client_is_bounded_in_tokens_a_minute() -> None:
    gate = Gate(clients=(ClientLimits(tokens_per_minute=30),))
    assert [gate.reason(15), gate.reason(14), gate.reason(15), gate.reason(1)] == ["", "", "", "rate_limit"]
    refusal = gate.ask()
    assert refusal is not None and refusal.retry_after == pytest.approx(30), "14 in debt, and one to begin with"
    gate.clock.now += 31
    gate.engine.generated_tokens = [30, 0]
    refusal = gate.ask()
    assert refusal is not None and refusal.retry_after == pytest.approx(59), "answers count, too, and once"
    gate.clock.now += 58
    assert gate.reason() == "rate_limit"
    gate.clock.now += 1.5
    assert gate.reason() == ""


def test_what_needs_no_slot_counts_as_well() -> None:
    """As requests a minute and as tokens, not as requests at once."""
    limits = ClientLimits(concurrency=1, requests_per_minute=6, tokens_per_minute=60)
    gate = Gate(clients=(limits, ClientLimits()))

    def charge(rows: int, client: int = 0) -> str:
        refusal = gate.admission.charge(client, rows, gate.engine)
        return "" if refusal is None else refusal.reason

    assert [charge(0), gate.reason(), charge(0), charge(40)] == [""] * 4
    gate.engine.ended_requests = [1, 0]
    assert [charge(30), gate.reason()] == ["", "rate_limit"], "14 in debt"
    refusal = gate.admission.charge(0, 1, gate.engine)
    assert refusal is not None and refusal.reason == "rate_limit" and refusal.retry_after == pytest.approx(15)
    gate.clock.now += 16
    assert [charge(0), charge(0), charge(0)] == ["", "", "rate_limit"], "requests, of which two have come back"
    assert [charge(10**6, client=1) for _ in range(9)] == [""] * 9
    assert charge(1, client=2) == charge(1, client=-1) == "invalid"


def test_what_is_refused_costs_nothing() -> None:
    gate = Gate(max_queue=0, clients=(ClientLimits(requests_per_minute=3, concurrency=3),))
    assert [gate.reason() for _ in range(10)] == ["", "", *["queue_full"] * 8]
    gate.engine.ended_sequences = 2
    assert gate.reason() == ""


def test_a_client_that_is_not_there_is_refused() -> None:
    gate = Gate()
    assert gate.reason(client=1) == gate.reason(client=-1) == "invalid"


def test_limits_reach_the_runner() -> None:
    limits = (ClientLimits(concurrency=3), ClientLimits(requests_per_minute=2, tokens_per_minute=7))
    config = RunnerConfig(clients=limits, max_queued_tokens=9)
    assert RunnerConfig.from_json(config.to_json()) == config


def test_a_bucket_takes_debts() -> None:
    clock = Clock()
    bucket = TokenBucket(60, clock)
    bucket.take(90)
    assert bucket.wait(1) == pytest.approx(31)
    clock.now += 31
    assert bucket.wait(1) == pytest.approx(0)
