"""One engine request as the routes see it: what its choices have produced, to be taken when there is news of it.

The engine client's receive callback fills an `Inbox`; its reader empties it through its `GenerationStream`. What a slow
reader has not taken yet is merged per choice, so a choice has at most one event waiting, however far behind its reader
is, and a token costs a list append rather than a queue item and a wake-up.

A reader is a callback: resuming a coroutine for every token of every stream costs more than detokenising and encoding
that token.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Protocol

from runner.messages import End, FinishReason, HiddenRows, PromptLogprobs, Started, TokenLogprobs
from server.errors import APIError
from server.metrics import Metrics
from server.request_context import RequestContext


@dataclass(slots=True)
class ChoiceEvent:
    """Everything new of one choice since its last event. Made once per token: what is rare has no list yet."""

    choice: int
    tokens: list[int]
    logprobs: list[TokenLogprobs] | tuple[()] = ()
    """Parallel to `tokens` if the request asked for logprobs, else empty."""
    started: Started | None = None
    prompt_logprobs: list[PromptLogprobs] | tuple[()] = ()
    """In order of position. They belong to the whole request and come with choice 0."""
    end: End | None = None
    """Set on the choice's last event."""
    hidden: list[HiddenRows] | tuple[()] = ()
    """In order of position. The prompt's come with choice 0."""


_SEVERITY: dict[FinishReason, int] = {"stop": 0, "length": 1, "abort": 2, "error": 3}


Direct = Callable[[int], bool]
"""Takes a token at once, where it is all that is new. False: it has to go the usual way."""


class Inbox:
    """The receiving end of one request, and its measurements."""

    __slots__ = (
        "accepted",
        "context",
        "created",
        "direct",
        "ended",
        "error",
        "first_slot",
        "first_token",
        "last_tokens",
        "loop",
        "max_tokens",
        "metrics",
        "on_news",
        "open",
        "pending",
        "prompt_tokens",
        "reader_context",
        "ready",
        "reason",
        "request",
        "timers",
        "tokens",
        "waking",
    )

    def __init__(
        self,
        request: int,
        n: int,
        prompt_tokens: int,
        metrics: Metrics,
        context: RequestContext | None,
        max_tokens: int = 0,
    ) -> None:
        self.request = request
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        """Of each choice; only measured."""
        self.tokens = 0
        """Of all choices, so far."""
        self.first_slot = self.first_token = 0.0
        """When the request got them; 0 before."""
        self.timers: list[asyncio.TimerHandle] = []
        """See `timeouts`."""
        self.metrics = metrics
        self.context = context
        self.created = time.monotonic()
        self.accepted = False
        self.error: APIError | None = None
        self.open = n
        """Choices that have not ended."""
        self.ended = [False] * n
        self.reason: FinishReason = "stop"
        """The request's: the most serious of its choices'."""
        self.ready: deque[ChoiceEvent] = deque()
        self.pending: list[ChoiceEvent | None] = [None] * n
        """The event of `ready` that belongs to a choice."""
        self.last_tokens = [0.0] * n
        """When each choice's last token arrived; 0 before its first."""
        self.loop = asyncio.get_running_loop()
        self.on_news: Callable[[], None] | None = None
        """The reader."""
        self.reader_context: Context | None = None
        self.direct: Direct | None = None
        """The reader's, of a request with one choice, while nothing is waiting for it."""
        self.waking = False
        """Whether the reader is going to be called."""

    # --- called by the engine client, once per item of a step -----------------------------------------------------

    def accept(self) -> None:
        if not self.accepted:
            self.accepted = True
            self._wake()

    def add_token(self, choice: int, token: int, logprobs: TokenLogprobs | None, now: float) -> float:
        """Returns when the choice's token before this one came; 0 for its first. (The caller measures the time between
        them for a whole step at once.)"""
        if self.direct is None or not self.direct(token):
            event = self.pending[choice] or self._event(choice)
            event.tokens.append(token)
            if logprobs is not None:
                if isinstance(event.logprobs, list):
                    event.logprobs.append(logprobs)
                else:
                    event.logprobs = [logprobs]
        last, self.last_tokens[choice] = self.last_tokens[choice], now
        self.tokens += 1
        if not last:
            self._measure_first_token(now)
        return last

    def add_started(self, started: Started) -> None:
        self._event(started.choice).started = started
        if started.choice == 0:
            self.first_slot = self.created + started.queue_seconds
            self.metrics.prompt_tokens.add(self.prompt_tokens)
            self.metrics.prompt_tokens_cached.add(started.cached_tokens)
            if self.context is not None:
                self.context.prompt_tokens += self.prompt_tokens
                self.context.cached_tokens += started.cached_tokens
                self.context.queue_seconds = max(self.context.queue_seconds, started.queue_seconds)
                if self.context.first_slot is None:
                    self.context.first_slot = self.first_slot - self.context.started

    def add_prompt_logprobs(self, entries: PromptLogprobs) -> None:
        event = self._event(0)
        if isinstance(event.prompt_logprobs, list):
            event.prompt_logprobs.append(entries)
        else:
            event.prompt_logprobs = [entries]

    def add_hidden(self, rows: HiddenRows) -> None:
        if self.ended[rows.choice]:
            return
        event = self._event(rows.choice)
        if isinstance(event.hidden, list):
            event.hidden.append(rows)
        else:
            event.hidden = [rows]

    def add_end(self, end: End) -> None:
        if not self.ended[end.choice]:
            self._event(end.choice).end = end
            self.close(end.choice, end.reason)

    def fail(self, error: APIError, reason: FinishReason = "error") -> None:
        """Raise `error` in the reader once it has taken what is ready."""
        if self.error is None and self.open:
            self.error = error
            self.reason = reason
            self.open = 0
        self._wake()

    def measure_end(self, now: float) -> None:
        """The request is over: count it, once. What it never got to took no time."""
        metrics, context = self.metrics, self.context
        first_token = self.first_token or now
        first_slot = min(self.first_slot or now, first_token)
        metrics.finished[self.reason].add()
        metrics.e2e_latency.observe(now - self.created)
        metrics.queue_time.observe(first_slot - self.created)
        metrics.prefill_time.observe(first_token - first_slot)
        metrics.decode_time.observe(now - first_token)
        metrics.inference_time.observe(now - first_slot)
        metrics.request_prompt_tokens.observe(self.prompt_tokens if self.first_slot else 0)
        metrics.request_generation_tokens.observe(self.tokens)
        metrics.request_n.observe(len(self.ended))
        metrics.request_max_tokens.observe(self.max_tokens)
        if context is not None:
            context.completion_tokens += self.tokens
            context.finish_reasons.append(self.reason)

    def cancel_timers(self) -> None:
        for timer in self.timers:
            timer.cancel()
        self.timers.clear()

    # --- called by the stream -------------------------------------------------------------------------------------

    def close(self, choice: int, reason: FinishReason) -> None:
        """Count `choice` as ended."""
        self.ended[choice] = True
        self.open -= 1
        if _SEVERITY[reason] > _SEVERITY[self.reason]:
            self.reason = reason

    def drop(self, choice: int) -> None:
        """Forget what is ready for `choice`: its reader wants nothing more of it."""
        event = self.pending[choice]
        if event is not None:
            self.ready.remove(event)
            self.pending[choice] = None

    def listen(self, on_news: Callable[[], None] | None) -> None:
        """Have `on_news` called, in the caller's context, when something has happened: the first event since the last
        one was taken, the acceptance, an error or the end."""
        self.on_news, self.reader_context, self.direct = on_news, copy_context(), None

    async def wait(self) -> None:
        """Until something has happened."""
        news = self.loop.create_future()
        self.listen(lambda: None if news.done() else news.set_result(None))
        try:
            await news
        finally:
            self.on_news = None

    def _event(self, choice: int) -> ChoiceEvent:
        event = self.pending[choice]
        if event is None:
            event = self.pending[choice] = ChoiceEvent(choice, [])
            self.ready.append(event)
            self.direct = None
            self.accepted = True  # Output may overtake the `Accepted` message.
            self._wake()
        return event

    def _measure_first_token(self, now: float) -> None:
        """Of a choice."""
        self.metrics.time_to_first_token.observe(now - self.created)
        if not self.first_token:
            self.first_token = now
            if self.context is not None and self.context.first_token is None:
                self.context.first_token = now - self.context.started

    def _wake(self) -> None:
        """Call the reader soon: when all that one step has for it is here."""
        if not self.waking and self.on_news is not None:
            self.waking = True
            self.loop.call_soon(self._tell, context=self.reader_context)

    def _tell(self) -> None:
        self.waking = False
        if self.on_news is not None:
            self.on_news()


class RequestOwner(Protocol):
    """What a stream needs of the engine client."""

    def abort(self, inbox: Inbox, choice: int) -> None:
        """Tell the runner that nothing more of `choice` (-1: of the request) is wanted."""

    def forget(self, inbox: Inbox) -> None:
        """Every choice has ended: drop the request and count it."""


class GenerationStream:
    """`listen`, and whenever there is news `take` until there is nothing left; until every choice has ended.

    Whoever has a stream calls `abort` in the end, which ends what has not ended; it needs no waiting, so that it also
    works in a task that is being cancelled. (What a route forgets or loses is aborted when its HTTP request is over,
    see `RequestContext.on_end`.) One reader at a time.
    """

    def __init__(self, owner: RequestOwner, inbox: Inbox) -> None:
        self._owner = owner
        self._inbox = inbox

    def listen(self, on_news: Callable[[], None] | None) -> None:
        """Have `on_news` called, in the caller's context, when there may be something to `take`, or nothing any more:
        now, where that is so already, and whenever it becomes so."""
        self._inbox.listen(on_news)
        if on_news is not None and (self._inbox.ready or not self._inbox.open):
            on_news()

    def take_directly(self, direct: Direct) -> None:
        """Have `direct` called with each token from now on, before anything else is, until there is other news or it
        returns False: those go the usual way. For the reader of a request with one choice, that has left nothing to
        `take`. It never gets a choice's last token."""
        if self._inbox.open == len(self._inbox.ended) == 1 and not self._inbox.ready:
            self._inbox.direct = direct

    def take(self) -> ChoiceEvent | None:
        """What is new of one choice; None: nothing at the moment, or nothing any more (`has_ended`). Raises APIError
        (EngineFailed) when the engine can no longer finish the request."""
        inbox = self._inbox
        if inbox.ready:
            event = inbox.ready.popleft()
            inbox.pending[event.choice] = None
            return event
        if inbox.error is not None:
            raise inbox.error
        return None

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come."""
        return not self._inbox.open and not self._inbox.ready

    def abort(self, choice: int = -1) -> None:
        """End `choice`, or (-1) every choice that has not ended; nothing more of it comes, no End either.

        One choice counts as a "stop" (the server has found a stop string), all of them as an "abort" (the client has
        gone).
        """
        inbox = self._inbox
        choices = range(len(inbox.ended)) if choice == -1 else (choice,)
        for each in choices:
            inbox.drop(each)
        running = [each for each in choices if not inbox.ended[each]]
        if not inbox.open or not running:
            return
        for each in running:
            inbox.close(each, "abort" if choice == -1 else "stop")
        self._owner.abort(inbox, -1 if not inbox.open else choice)
        if not inbox.open:
            self._owner.forget(inbox)
            inbox._wake()  # the reader, where somebody else has aborted
