"""Whether a request may join the queue. Asked by the endpoint's receiving thread, which is one for all API processes:
so its limits hold over all of them.

The queue is bounded in requests, in prompt rows and in bytes of embeddings; each client (an API key of the server's) in
requests at once, requests a minute and tokens a minute, which look-ups and uploads use up, too. What has been admitted
is counted here, what has ended by the engine: each number only grows and is written by one thread, so there is no lock
and no difference is ever too small.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from runner.config import ClientLimits, RunnerConfig
from runner.messages import RejectReason
from runner.sequence import Request


class Ended(Protocol):
    """What the engine has counted since its start (`engine.Engine`)."""

    @property
    def ended_sequences(self) -> int: ...

    @property
    def released_row_bytes(self) -> int: ...

    @property
    def unqueued_rows(self) -> int:
        """Prompt rows of requests that wait no more."""

    @property
    def ended_requests(self) -> Sequence[int]:
        """By client."""

    @property
    def generated_tokens(self) -> Sequence[int]:
        """By client, of sequences that have ended."""


@dataclass(frozen=True)
class Refusal:
    reason: RejectReason
    message: str
    retry_after: float = 1.0
    """Seconds."""


class TokenBucket:
    """Holds a minute's worth and is refilled steadily. What is taken may be more than is there: then it takes longer
    until anything may be taken again."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self._rate = per_minute / 60
        self._size = self._level = float(per_minute)
        self._clock = clock
        self._filled = clock()

    def wait(self, least: float) -> float:
        """Seconds until it holds `least`; 0 if it does."""
        now = self._clock()
        self._level = min(self._size, self._level + (now - self._filled) * self._rate)
        self._filled = now
        return max(0.0, (least - self._level) / self._rate)

    def take(self, amount: float) -> None:
        self._level -= amount


class Client:
    """One client's limits, and what it has had."""

    def __init__(self, limits: ClientLimits, clock: Callable[[], float]) -> None:
        self._concurrency = limits.concurrency
        self._requests = TokenBucket(limits.requests_per_minute, clock) if limits.requests_per_minute else None
        self._tokens = TokenBucket(limits.tokens_per_minute, clock) if limits.tokens_per_minute else None
        self._limits = limits
        self._accepted = 0
        self._generated = 0
        """Of its generated tokens, those that have been taken from the bucket."""

    def refusal(self, ended_requests: int, generated_tokens: int) -> Refusal | None:
        if self._concurrency is not None and self._accepted - ended_requests >= self._concurrency:
            return Refusal("concurrency", f"This API key may have {self._concurrency} requests running at once.")
        return self.too_soon(generated_tokens)

    def too_soon(self, generated_tokens: int) -> Refusal | None:
        """By what it has had in the last minute."""
        if self._tokens is not None:
            self._tokens.take(generated_tokens - self._generated)
            self._generated = generated_tokens
        wait = 0.0 if self._requests is None else self._requests.wait(1.0)
        if wait:
            limit = f"{self._limits.requests_per_minute} requests a minute"
            return Refusal("rate_limit", f"This API key may send {limit}.", wait)
        wait = 0.0 if self._tokens is None else self._tokens.wait(1.0)
        if wait:
            limit = f"{self._limits.tokens_per_minute} tokens a minute"
            return Refusal("rate_limit", f"This API key may use {limit}, of prompts and answers together.", wait)
        return None

    def accept(self, prompt_rows: int) -> None:
        self._accepted += 1
        self.charge(prompt_rows)

    def charge(self, rows: int) -> None:
        """One request, and its tokens."""
        if self._requests is not None:
            self._requests.take(1)
        if self._tokens is not None:
            self._tokens.take(rows)


class Admission:
    def __init__(self, config: RunnerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._sequences = 0
        self._row_bytes = 0
        self._rows = 0
        self._clients = [Client(limits, clock) for limits in config.clients]

    def refusal(self, request: Request, ended: Ended, max_num_seqs: int) -> Refusal | None:
        """Why the request may not be queued, or None."""
        config = self._config
        if not 0 <= request.client < len(self._clients):
            return Refusal("invalid", "there is no such client")
        if self._sequences - ended.ended_sequences >= max_num_seqs + config.max_queue:
            return Refusal("queue_full", "The server's queue is full.")
        rows, limit = self._rows - ended.unqueued_rows, config.max_queued_tokens
        if limit is not None and rows and rows + request.prompt_len > limit:
            return Refusal("tokens_full", f"The server's queue is full: it takes prompts of {limit} tokens together.")
        row_bytes = self._row_bytes - ended.released_row_bytes
        if request.row_bytes and row_bytes + request.row_bytes > config.max_row_bytes:
            return Refusal("rows_full", "The server's memory for prompt embeddings is full.")
        client = request.client
        return self._clients[client].refusal(ended.ended_requests[client], ended.generated_tokens[client])

    def charge(self, client: int, rows: int, ended: Ended) -> Refusal | None:
        """For what is answered without the queue (look-ups, uploads): it counts as a request of so many tokens. Or why
        it may not be answered now."""
        if not 0 <= client < len(self._clients):
            return Refusal("invalid", "there is no such client")
        refusal = self._clients[client].too_soon(ended.generated_tokens[client])
        if refusal is None:
            self._clients[client].charge(rows)
        return refusal

    def accept(self, request: Request) -> None:
        self._sequences += request.n
        self._row_bytes += request.row_bytes
        self._rows += request.prompt_len
        self._clients[request.client].accept(request.prompt_len)
