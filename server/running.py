"""The answers that are being made, by their own ids: how `abort` finds the one that it is to end.

An id is 128 random bits that only the client of the answer has seen. That alone would do; where the server has API keys
an answer can only be aborted with the key that it was asked for with.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

from server.request_context import current_request


class Abortable(Protocol):
    """`answer.Answer`, as far as it is used here."""

    def abort(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Running:
    api_key: int | None
    answer: Abortable


class RunningAnswers:
    def __init__(self) -> None:
        self._answers: dict[str, _Running] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, answer_id: str, answer: Abortable) -> None:
        """Until the current request is over, however it ends."""
        context = current_request.get()
        if context is not None:
            self._answers[answer_id] = _Running(context.api_key, answer)
            context.on_end.append(partial(self._remove, answer_id))

    def abort(self, answer_id: str) -> bool:
        """False where there is none by that id that was asked for with this request's API key."""
        running, context = self._answers.get(answer_id), current_request.get()
        if running is None or context is None or running.api_key != context.api_key:
            return False
        running.answer.abort()
        return True

    def _remove(self, answer_id: str) -> None:
        self._answers.pop(answer_id, None)
