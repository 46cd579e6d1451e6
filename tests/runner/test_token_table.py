"""Look-ups in the model's embedding table: rows, their order, and what is rejected."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from runner.messages import FromRunner, LookUp, Rejected, TokenRows
from runner.model import Model
from runner.token_table import MAX_WAITING, TokenTable
from tests.models import HIDDEN_SIZE, VOCAB_SIZE, Family, embed, random_prompt
from tests.parity.harness import Harness


class Sent:
    def __init__(self) -> None:
        self.messages: list[tuple[int, FromRunner]] = []
        self.ends = 0
        self._news = threading.Condition()

    def __call__(self, worker: int, message: FromRunner) -> None:
        with self._news:
            self.messages.append((worker, message))
            self.ends += isinstance(message, Rejected) or (isinstance(message, TokenRows) and message.is_last)
            self._news.notify()

    def wait(self, ends: int) -> None:
        with self._news:
            assert self._news.wait_for(lambda: self.ends >= ends, 30)


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[Family], Path]) -> Model:
    return Harness(tiny_model("gemma3")).engine.model


def frame(ids: list[int]) -> list[memoryview]:
    return [memoryview(np.array(ids, np.int32).tobytes())]


def test_rows_come_in_pieces_in_order(
    model: Model, tiny_model: Callable[[Family], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.token_table.PIECE_BYTES", 5 * HIDDEN_SIZE * 4)
    monkeypatch.setattr("runner.token_table._ROWS_AT_ONCE", 12)
    sent = Sent()
    table = TokenTable(model, 128, sent)
    asked = {number: random_prompt(length, number) for number, length in enumerate((1, 12, 40), 5)}
    for number, ids in asked.items():
        table.look_up(LookUp(3, number), frame(ids))
    sent.wait(3)
    assert {worker for worker, _ in sent.messages} == {3}
    for number, ids in asked.items():
        parts = [m for _, m in sent.messages if isinstance(m, TokenRows) and m.request == number]
        assert [part.is_last for part in parts] == [False] * (len(parts) - 1) + [True]
        assert max(len(part.rows) for part in parts) <= 5 * HIDDEN_SIZE * 4
        rows = np.frombuffer(b"".join(part.rows for part in parts), np.float32).reshape(-1, HIDDEN_SIZE)
        assert torch.equal(torch.from_numpy(rows.copy()), embed(tiny_model("gemma3"), ids))
    assert model.embedding_scale == 8.0


@pytest.mark.parametrize(
    "frames",
    [[], frame([5]) * 2, [memoryview(b"12345")], frame([]), frame([5] * 129), frame([-1]), frame([VOCAB_SIZE])],
)
def test_what_is_invalid(model: Model, frames: list[memoryview]) -> None:
    sent = Sent()
    TokenTable(model, 128, sent).look_up(LookUp(0, 1), frames)
    ((_, message),) = sent.messages
    assert isinstance(message, Rejected)
    assert message.reason == "invalid"


def test_one_of_several_clients_may_have_a_quarter(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, gate = Sent(), threading.Event()
    table = TokenTable(model, 128, sent, num_clients=3)
    rows = table._rows
    monkeypatch.setattr(table, "_rows", lambda ids: rows(ids) if gate.wait(30) else None)
    for number in range(MAX_WAITING // 4 + 2):
        table.look_up(LookUp(0, number, 1), frame([5]))
    table.look_up(LookUp(0, 99, 2), frame([5]))
    sent.wait(2)
    assert [m.request for _, m in sent.messages] == [MAX_WAITING // 4, MAX_WAITING // 4 + 1]  # type: ignore[union-attr]
    gate.set()
    sent.wait(MAX_WAITING // 4 + 3)
    assert 99 in [m.request for _, m in sent.messages if isinstance(m, TokenRows)]
    table.look_up(LookUp(0, 100, 1), frame([5]))
    sent.wait(MAX_WAITING // 4 + 4)


def test_too_many_wait(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a device that fails rejects one, not all that follow."""
    sent, gate = Sent(), threading.Event()
    table = TokenTable(model, 128, sent)
    rows = table._rows

    def slowly(ids: np.ndarray[tuple[int], np.dtype[np.int32]]) -> torch.Tensor:
        gate.wait(30)
        if ids[0] == 7:
            raise torch.OutOfMemoryError("no memory")
        return rows(ids)

    monkeypatch.setattr(table, "_rows", slowly)
    for number in range(MAX_WAITING + 1):
        table.look_up(LookUp(0, number), frame([7 if number == 3 else 5]))
    sent.wait(1)
    ((_, message),) = sent.messages
    assert isinstance(message, Rejected)
    assert (message.request, message.reason) == (MAX_WAITING, "queue_full")
    gate.set()
    sent.wait(MAX_WAITING + 1)
    rejected = [m.request for _, m in sent.messages if isinstance(m, Rejected)]
    assert rejected == [MAX_WAITING, 3]
    table.look_up(LookUp(0, 99), frame([5]))
    sent.wait(MAX_WAITING + 2)
