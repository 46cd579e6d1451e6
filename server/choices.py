"""One choice of an answer: the runner's tokens in, pieces of text out.

Whole and streamed answers are made of the same `Delta`s: a whole answer is their concatenation. So what a client sees
(text, log-probabilities, token ids, the reason for the end) cannot differ between the two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from runner.messages import End, TokenLogprobs
from server.detokenizer import Detokenizer
from server.errors import EngineFailed, InvalidRequest, Unavailable
from server.hidden_states import HiddenBlock
from server.stops import StopScanner


@dataclass(slots=True)
class TokenRecord:
    """One token of a choice, for log-probabilities and `return_token_ids`."""

    token_id: int
    logprobs: TokenLogprobs | None
    offset: int
    """Where its text begins, in characters from the beginning of the choice's text (the echoed prompt included)."""


@dataclass(slots=True)
class Delta:
    """What is new of a choice. The last one has a `finish_reason`."""

    index: int
    text: str = ""
    tokens: Sequence[TokenRecord] = ()
    """Those whose text is out with this delta. Empty unless records were asked for."""
    prompt: Sequence[TokenRecord] = ()
    """The echoed prompt's, in the first delta if it is to have log-probabilities."""
    is_first: bool = False
    num_new_tokens: int = 0
    """How many tokens the choice has made since its last delta, whether their text is out or not."""
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None
    """The stop string or the client's own stop token that ended the choice."""
    hidden: HiddenBlock | None = None
    """With the `finish_reason`, if hidden states were asked for."""


@dataclass(frozen=True, slots=True)
class ChoiceOptions:
    """What all choices of a request have in common."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    client_stop_ids: frozenset[int] = frozenset()
    """The ids that the client named, as opposed to the model's own."""
    keep_records: bool = False


class Choice:
    """`echo`: text that comes before the first token's."""

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        options: ChoiceOptions,
        *,
        echo: str = "",
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self._num_told = 0
        self.finished = False
        self.prompt: list[TokenRecord] = []
        """The echoed prompt's records. Set before the first `feed`."""
        self._detokenizer = detokenizer
        self._options = options
        self._stops = StopScanner(options.stop, include_stop=options.include_stop)
        self._is_plain = not (options.stop or options.keep_records)
        """Whether all text is out at once, and nobody asks which token it came from."""
        self._unsent: list[str] = [echo]
        self._decoded = len(echo)
        """Characters of the text so far, those held back included."""
        self._released = len(echo)
        """Characters of the text so far, those held back not included."""
        self._waiting: deque[tuple[TokenRecord, int]] = deque()
        """Records, each with the offset at which its text ends."""
        self._ready: list[TokenRecord] = []
        self._is_first = True

    def feed(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None], end: End | None) -> Delta | None:
        """The next tokens (`logprobs`: parallel, or empty). None when there is nothing to be seen yet.

        Raises APIError when the engine gave the choice up. After a delta with a `finish_reason` nothing may follow; the
        runner need not know of that end yet (`end` may be None).
        """
        if self.finished:
            return None
        if self._is_plain and end is None:
            return self._feed_plain(tokens)
        stop_token = end.stop_token if end is not None else None
        for position, token in enumerate(tokens):
            is_stop_token = stop_token is not None and position == len(tokens) - 1
            self._add(token, logprobs[position] if logprobs else None, is_stop_token)
            if self._stops.hit is not None:
                return self._finish("stop", self._stops.hit)
        if end is None:
            return self._take() if any(self._unsent) else None
        if end.reason == "error" and end.fault == "request":
            raise InvalidRequest(end.message, code="generation_failed")
        if end.reason == "error":
            raise EngineFailed(end.message or "The engine failed on this request.")
        if end.reason == "abort":
            raise Unavailable("The request was aborted by the server.")
        self._release(self._stops.push(self._detokenizer.flush()))
        if self._stops.hit is not None:
            return self._finish("stop", self._stops.hit)
        self._release(self._stops.flush())
        named = stop_token is not None and stop_token in self._options.client_stop_ids
        return self._finish(end.reason, stop_token if named else None)

    @property
    def texts(self) -> Mapping[int, str | None] | None:
        """By token: what is new when the engine makes it, and nothing else is. It need not be fed then, only counted in
        `num_tokens`. As `Detokenizer.texts`."""
        if not self._is_plain or self._is_first or self.finished:
            return None
        return self._detokenizer.texts

    def _feed_plain(self, tokens: Sequence[int]) -> Delta | None:
        """What `_add` comes to in the usual case, which happens for nearly every token there is."""
        self.num_tokens += len(tokens)
        push = self._detokenizer.push
        text = push(tokens[0]) if len(tokens) == 1 else "".join(map(push, tokens))
        if self._is_first:
            self._unsent.append(text)  # an echo comes before it
            return self._take() if any(self._unsent) else None
        if not text:
            return None
        new_tokens, self._num_told = self.num_tokens - self._num_told, self.num_tokens
        return Delta(self.index, text, (), (), False, new_tokens)

    def _add(self, token: int, logprobs: TokenLogprobs | None, is_stop_token: bool) -> None:
        self.num_tokens += 1
        hidden = is_stop_token and not self._options.include_stop
        text = "" if hidden else self._detokenizer.push(token)
        if self._options.keep_records:
            self._waiting.append((TokenRecord(token, logprobs, self._decoded), self._decoded + len(text)))
        self._decoded += len(text)
        # A stop string, like a stop token, does not count before `min_tokens` tokens.
        if self._options.stop and self.num_tokens >= self._options.min_tokens:
            text = self._stops.push(text)
        if text or self._waiting:
            self._release(text)

    def _release(self, text: str) -> None:
        self._unsent.append(text)
        self._released += len(text)
        while self._waiting and self._waiting[0][1] <= self._released:
            self._ready.append(self._waiting.popleft()[0])

    def _finish(self, reason: Literal["stop", "length"], stop_reason: int | str | None) -> Delta:
        self.finished = True
        for record, _ in self._waiting:
            # The text of a stop string is cut off; its tokens stay, for they were made and are counted.
            record.offset = min(record.offset, self._released)
            self._ready.append(record)
        self._waiting.clear()
        delta = self._take()
        delta.finish_reason = reason
        delta.stop_reason = stop_reason
        return delta

    def _take(self) -> Delta:
        new_tokens = self.num_tokens - self._num_told
        delta = Delta(self.index, "".join(self._unsent), self._ready, self.prompt, self._is_first, new_tokens)
        self._unsent, self._ready, self.prompt, self._is_first = [], [], [], False
        self._num_told = self.num_tokens
        return delta
