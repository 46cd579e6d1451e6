"""What is known about the HTTP request being answered: filled in on its way, read once for its log line.

A context variable rather than an argument: the engine client sees the tokens, the outermost middleware writes the line,
and no route in between has to pass anything on.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from runner.messages import SamplingParams
from server.delivery import Cut


def new_request_id() -> str:
    """The `x-request-id` of an answer."""
    return f"req-{secrets.token_hex(12)}"


@dataclass(slots=True)
class RequestContext:
    """One HTTP request. Counts and times only: nothing here holds content."""

    id: str
    """Ours, also sent as `x-request-id`."""
    client_id: str = ""
    """The client's own `x-request-id`, for the log line and for nothing else."""
    api_key: int | None = None
    """Which of the server's API keys it came with."""
    started: float = field(default_factory=time.monotonic)
    status: int = 0
    """That of the answer's head once it is sent; of a cut answer what it counts as."""
    cut: Cut | None = None
    """Why the answer was not complete."""
    sent_status: int = 0
    """Of a cut answer: the status that its client may have seen, 0 if none was sent."""
    error: str | None = None
    """The code of the error that the client was told, in its answer or at the end of its stream."""
    complete: bool = False
    """Whether the whole answer was sent."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queue_seconds: float = 0.0
    """Until its prompts had slots: the longest wait of them."""
    first_slot: float | None = None
    """Seconds from the request's arrival until the first of its prompts had a slot."""
    decode_seconds: float = 0.0
    """Spent in decoding its embedding files."""
    first_token: float | None = None
    """Seconds from the request's arrival to its first token."""
    finish_reasons: list[str] = field(default_factory=list)
    """How each engine request ended: one per prompt, not per choice."""
    model: str = ""
    """One of the server's names, which the answer says."""
    answer_id: str = ""
    sampling: SamplingParams | None = None
    """The first prompt's. Not for the log: a grammar is content."""
    choices: int = 1
    """Of each prompt."""
    stream: bool = False
    release_body: Callable[[], None] = lambda: None
    """Set by the body limit: its count of what is held for this request's body goes down."""
    on_end: list[Callable[[], None]] = field(default_factory=list)
    """Called once the answer is complete or given up, whatever its route did: closes the streams opened for it."""

    def note_cut(self, cut: Cut) -> None:
        """The answer ended before its end, as far as its client is concerned."""
        self.cut = cut
        self.sent_status, self.status = self.status, cut.status
        if not self.sent_status:
            self.error = None  # Nobody was told.

    def end(self) -> None:
        while self.on_end:
            self.on_end.pop()()


current_request: ContextVar[RequestContext | None] = ContextVar("current_request", default=None)


def current_client() -> int:
    """Whose the current request is, as the runner knows its clients: by the number of the API key."""
    context = current_request.get()
    return (context and context.api_key) or 0


def release_body() -> None:
    """Called by a route that holds nothing of its request's body any more, though its answer has not begun."""
    context = current_request.get()
    if context is not None:
        context.release_body()


def note_decoding(seconds: float) -> None:
    """Called where an embedding file has been decoded, in a thread that works for the request (`asyncio.to_thread`
    takes the context along); a request decodes one file at a time."""
    context = current_request.get()
    if context is not None:
        context.decode_seconds += seconds
