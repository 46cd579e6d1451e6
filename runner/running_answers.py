"""The answers that are being made, by the ids under which clients know them: how an abort finds the requests that it is
to end, whichever API process they came from.

Used by the endpoint: its receiving thread adds and finds, the engine's thread removes what has ended. So there is a
lock, held for microseconds.

An id is 128 random bits that only the client of the answer has seen. That alone would do; where the server has API keys
an answer can only be aborted with the key that it was asked for with.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from runner.sequence import Key


@dataclass(slots=True)
class _Running:
    client: int
    requests: set[Key] = field(default_factory=set)


class RunningAnswers:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: dict[str, _Running] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, answer: str, client: int, request: Key) -> None:
        """`request` is for `answer`; nothing where that has no id. Each `add` is followed by one `remove`."""
        if answer:
            with self._lock:
                self._answers.setdefault(answer, _Running(client)).requests.add(request)

    def remove(self, answer: str, request: Key) -> None:
        if answer:
            with self._lock:
                running = self._answers.get(answer)
                if running is not None:
                    running.requests.discard(request)
                    if not running.requests:
                        del self._answers[answer]

    def find(self, answer: str, client: int) -> list[Key]:
        """The requests that are for an answer of this client's; none where there is no such answer."""
        with self._lock:
            running = self._answers.get(answer)
            return [] if running is None or running.client != client else sorted(running.requests)
