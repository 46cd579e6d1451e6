"""A request as the runner keeps it, and its sequences: one a choice.

Made by the engine from a `Generate` message; scheduled, preempted and ended by the scheduler.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from runner.block_hash import BlockHashes, TwoWaySpan, position_offset
from runner.embedding_store import StoredRows
from runner.grammar import Matcher
from runner.hidden import NO_POSITION, KeptHidden, first_hidden
from runner.hints import hinted_ids
from runner.images import ImageInput, InvalidImage, image_inputs
from runner.messages import DIGEST_BYTES, EMBEDDING_ID, Generate, SamplingParams, Span, VisionInfo

Key = tuple[int, int]
"""(worker, request)"""


class InvalidRequest(ValueError):
    """The message doesn't describe a request that this runner can run. Workers check first; this is the second line."""


@dataclass(eq=False)
class Request:
    key: Key
    n: int
    sampling: SamplingParams
    token_ids: NDArray[np.int32]
    """[prompt_len]"""
    spans: tuple[Span, ...]
    rows: tuple[NDArray[np.uint8], ...]
    """[span.length, hidden_size * itemsize] each: the rows' bytes in the model's dtype, in the message's own memory. Of
    an image, no rows before it is encoded."""
    row_digests: bytes
    hashes: BlockHashes
    row_bytes: int = 0
    """Host memory that the request is counted with: all frames of its spans, and the rows that images become."""
    images: list[ImageInput] = field(default_factory=list)
    """Those that are still to be encoded."""
    unwanted: set[int] = field(default_factory=set)
    """Choices that were aborted while it waited for its images."""
    two_way: tuple[TwoWaySpan, ...] = ()
    position_ids: NDArray[np.int32] | None = None
    """[3, prompt_len], if they aren't the rows' own places."""
    is_alone: bool = False
    """Nobody else ever finds its blocks: they get no keys, unless it is preempted."""
    priority: int = 0
    client: int = 0
    has_left_queue: bool = False
    """A sequence of it has had a slot, or all have ended."""
    arrived: float = field(default_factory=time.monotonic)
    slot_ids: NDArray[np.int32] | None = None
    """[prompt_len]: `token_ids` as the slots hold them where some embedding rows have hints (`runner.hints`). The
    host's own ids, and with them the cache's keys, know nothing of hints."""
    matchers: list[Matcher] = field(default_factory=list)
    """One a choice where `sampling.grammar` is given, set before the engine sees the request."""
    on_release: Callable[[], None] = lambda: None
    """Called once, when nothing of the request is needed any more: gives the stored embeddings back."""

    @cached_property
    def possible_stop_ids(self) -> tuple[int, ...]:
        """Those of `sampling.stop_token_ids` that can be sampled."""
        allowed = set(self.sampling.allowed_token_ids)
        return tuple(token for token in self.sampling.stop_token_ids if not allowed or token in allowed)

    @property
    def prompt_len(self) -> int:
        return len(self.token_ids)

    @property
    def answer_start(self) -> int:
        """The position of the answer's first token: behind the latent steps."""
        return len(self.token_ids) + self.sampling.latent_steps

    @cached_property
    def position_offset(self) -> int:
        """Of the rows behind the prompt (`block_hash.position_offset`)."""
        return position_offset(self.position_ids)

    def unsplit(self, row: int) -> int:
        """`row`, or the start of the two-way span that a cut before `row` would split."""
        place = bisect_right(self.two_way, row, key=lambda span: span.start) - 1
        if place < 0:
            return row
        span = self.two_way[place]
        return span.start if span.start < row < span.end else row

    def two_way_end(self, row: int) -> int:
        """The end of the two-way span that begins at `row`; `row` where none does."""
        place = bisect_right(self.two_way, row, key=lambda span: span.start) - 1
        return self.two_way[place].end if place >= 0 and self.two_way[place].start == row else row

    def set_rows(self, span: int, rows: NDArray[np.uint8]) -> None:
        """The rows of a span that was an image."""
        self.rows = (*self.rows[:span], rows, *self.rows[span + 1 :])

    @staticmethod
    def from_message(message: Generate, frames: list[memoryview], *, vocab_size: int, row_size: int, max_model_len: int,
                     block_size: int, private_cache: bool, vision: VisionInfo | None = None,
                     stored: tuple[StoredRows, ...] = ()) -> Request:  # fmt: skip
        """Checks and wraps a message; the frames are viewed, not copied.

        Args:
            frames: see `runner.messages`. row_size: bytes of one embedding row.
            private_cache: no block is ever shared with another request (prefix caching is off); siblings still share.
            stored: what the spans name, in their order, those without a name left out.

        Raises:
            InvalidRequest
        """
        spans, sampling = message.spans, message.sampling
        after_hints = 3 if message.has_hints else 2
        first_span = after_hints + message.has_positions
        if len(frames) != first_span + len(spans) or frames[0].nbytes % 4:
            raise InvalidRequest("malformed frames")
        token_ids = np.frombuffer(frames[0], np.int32)
        prompt_len = len(token_ids)
        rows = prompt_len + sampling.latent_steps + sampling.max_tokens
        if not 1 <= prompt_len <= max_model_len or rows > max_model_len or sampling.latent_steps < 0:
            raise InvalidRequest(f"prompt and answer must fit in {max_model_len} rows")
        may_be_silent = sampling.prompt_logprobs is not None or sampling.return_hidden_states != ""
        if message.n < 1 or sampling.max_tokens < (0 if may_be_silent else 1):
            raise InvalidRequest("n and max_tokens must be at least 1")
        alone = (message.n, sampling.max_tokens, sampling.latent_steps) == (1, 0, 0)
        if sampling.return_hidden_states == "mean" and not alone:
            raise InvalidRequest("a mean is of one prompt without an answer")
        embedding = token_ids == EMBEDDING_ID
        if token_ids.max() >= vocab_size or token_ids.min() < EMBEDDING_ID:
            raise InvalidRequest(f"token ids must be below {vocab_size}")
        edits = [token for token, _ in sampling.logit_bias] + list(sampling.stop_token_ids)
        edits += sampling.allowed_token_ids
        edits += [token for word in sampling.bad_words for token in word]
        if not all(sampling.bad_words):
            raise InvalidRequest("bad words must not be empty")
        if edits and not 0 <= min(edits) <= max(edits) < vocab_size:
            raise InvalidRequest(f"token ids must be below {vocab_size}")
        covered = 0
        for span, frame in zip(spans, frames[first_span:], strict=True):
            end = span.start + span.length
            if not covered <= span.start < end <= prompt_len or not embedding[span.start : end].all():
                raise InvalidRequest("spans must be ordered and cover the embedding rows")
            size = 0 if span.stored else span.length * row_size
            if (span.stored and span.pixels) or (not span.pixels and frame.nbytes != size):
                raise InvalidRequest(f"an embedding row has {row_size} bytes")
            covered = end
        if int(embedding.sum()) != sum(span.length for span in spans):
            raise InvalidRequest("spans and digests must match the embedding rows")
        digests = _all_digests(spans, bytes(frames[1]), stored)
        salt = message.cache_salt.encode()
        if private_cache:
            salt += b"\0%d,%d" % (message.worker, message.request)
        position_ids = _positions(frames[after_hints], prompt_len, vision) if message.has_positions else None
        two_way = _two_way(spans, digests, vision)
        try:
            images = image_inputs(spans, frames[first_span:], digests, vision, salt=message.cache_salt.encode())
        except InvalidImage as error:
            raise InvalidRequest(str(error)) from None
        no_rows = memoryview(b"")
        row_frames = [no_rows if s.pixels else f for s, f in zip(spans, frames[first_span:], strict=True)]
        own_rows = [np.frombuffer(f, np.uint8).reshape(-1, row_size) for f in row_frames]
        leased = iter(stored)
        return Request(
            key=(message.worker, message.request),
            n=message.n,
            sampling=sampling,
            token_ids=token_ids,
            spans=spans,
            rows=tuple(next(leased).rows if s.stored else own for s, own in zip(spans, own_rows, strict=True)),
            row_digests=digests,
            hashes=BlockHashes(salt, block_size, two_way, position_ids),
            row_bytes=sum(f.nbytes for f in frames[first_span:]) + sum(i.num_rows * row_size for i in images),
            images=images,
            two_way=two_way,
            position_ids=position_ids,
            is_alone=private_cache and message.n == 1,
            priority=message.priority,
            client=message.client,
            slot_ids=_slot_ids(token_ids, embedding, frames[2], vocab_size) if message.has_hints else None,
        )

    def embedding_rows(self, start: int, end: int) -> list[tuple[int, NDArray[np.uint8]]]:
        """The embedding rows among prompt rows start … end - 1: (prompt row of the first, their bytes) a run."""
        runs = []
        # Every chunk of a prompt asks: of many spans only its own may be looked at.
        place = bisect_right(self.spans, start, key=lambda span: span.start + span.length)
        for span, rows in zip(self.spans[place:], self.rows[place:], strict=True):
            if span.start >= end:
                break
            first, last = max(span.start, start), min(span.start + span.length, end)
            runs.append((first, rows[first - span.start : last - span.start]))
        return runs


def _positions(frame: memoryview, prompt_len: int, vision: VisionInfo | None) -> NDArray[np.int32]:
    if vision is None or not vision.mrope or frame.nbytes != 3 * 4 * prompt_len:
        raise InvalidRequest("position ids are three a row, for models that have them")
    positions = np.frombuffer(frame, np.int32).reshape(3, prompt_len)
    if positions.min() < 0 or positions.max() >= prompt_len:
        raise InvalidRequest("position ids must be below the prompt's length")
    return positions


def _two_way(spans: tuple[Span, ...], digests: bytes, vision: VisionInfo | None) -> tuple[TwoWaySpan, ...]:
    found, first = [], 0
    for span in spans:
        if span.two_way:
            if vision is None or not vision.two_way:
                raise InvalidRequest("this model's rows attend to those before them only")
            if span.length > vision.max_rows:
                raise InvalidRequest(f"an image's rows, which attend both ways, are at most {vision.max_rows}")
            own = digests[first * DIGEST_BYTES : (first + span.length) * DIGEST_BYTES]
            digest = blake2b(own, digest_size=DIGEST_BYTES).digest()
            found.append(TwoWaySpan(span.start, span.start + span.length, digest))
        first += span.length
    return tuple(found)


def _all_digests(spans: tuple[Span, ...], own: bytes, stored: tuple[StoredRows, ...]) -> bytes:
    """One digest per embedding row, those of stored rows between the request's own. Raises InvalidRequest."""
    if not stored and not any(span.stored for span in spans):
        digests, used = [own], len(own)
    else:
        leased, digests, used = iter(stored), [], 0
        for span in spans:
            if not span.stored:
                digests.append(own[used : used + span.length * DIGEST_BYTES])
                used += span.length * DIGEST_BYTES
                continue
            entry = next(leased, None)
            if entry is None or len(entry.rows) != span.length:
                raise InvalidRequest("a span must have the length of the stored embedding that it names")
            digests.append(entry.digests)
    if used != len(own) or sum(map(len, digests)) != sum(span.length for span in spans) * DIGEST_BYTES:
        raise InvalidRequest("spans and digests must match the embedding rows")
    return b"".join(digests)


def _slot_ids(
    token_ids: NDArray[np.int32], embedding: NDArray[np.bool_], frame: memoryview, vocab_size: int
) -> NDArray[np.int32]:
    """Raises InvalidRequest."""
    if frame.nbytes != 4 * int(embedding.sum()):
        raise InvalidRequest("hints must match the embedding rows")
    hints = np.frombuffer(frame, np.int32)
    if len(hints) and not EMBEDDING_ID <= int(hints.min()) <= int(hints.max()) < vocab_size:
        raise InvalidRequest(f"hints must be below {vocab_size}")
    slot_ids = token_ids.copy()
    slot_ids[embedding] = hinted_ids(hints)
    return slot_ids


@dataclass(eq=False)
class Sequence:
    """One choice of a request. While it runs, `slot` says where its counters live (`slot_table.SlotTable`)."""

    request: Request
    choice: int
    hashes: BlockHashes
    token_ids: NDArray[np.int32]
    """The rows known when it last had no slot: the prompt, and after a preemption the tokens made before it."""
    slot: int = -1
    admission: int = -1
    """Grows with every admission; the newest is preempted first."""
    ended: bool = False
    started: bool = False
    prompt_logprobs_sent: int = 1
    """Prompt positions below this one need no log-probability (any more)."""
    waits_for: Sequence | None = None
    """The sibling that computes the prompt's blocks, until it has."""
    matcher: Matcher | None = None
    """What its tokens must follow. Knows every token that has retired, and none that is in flight."""
    hidden_from: int = NO_POSITION
    """The hidden states from this position on are wanted and not taken yet."""
    kept_hidden: KeptHidden = field(default_factory=KeptHidden)
    """What of them is sent with its end."""
    latents: list[NDArray[np.uint8]] = field(default_factory=list)
    """The rows of its latent steps that have retired: their bytes in the model's dtype."""

    @property
    def scores_prompt(self) -> bool:
        """Whether it computes the prompt's log-probabilities: one choice does for all, and reads no cached prefix."""
        return self.choice == 0 and self.request.sampling.prompt_logprobs is not None

    @property
    def is_inspected(self) -> bool:
        """Whether every step that it is in has to be looked at for its hidden states."""
        sampling = self.request.sampling
        return bool(sampling.latent_steps or sampling.return_hidden_states)

    @property
    def limit(self) -> int:
        """Rows at which the sequence ends with reason "length"."""
        return self.request.answer_start + self.request.sampling.max_tokens

    def embedding_rows(self, start: int, end: int) -> list[tuple[int, NDArray[np.uint8]]]:
        """Those among known rows start … end - 1, as `Request.embedding_rows` has them: the prompt's, and latent steps
        from before a preemption."""
        runs, prompt_len = self.request.embedding_rows(start, end), self.request.prompt_len
        first, last = max(start, prompt_len), min(end, prompt_len + len(self.latents))
        if first < last:
            runs.append((first, np.stack(self.latents[first - prompt_len : last - prompt_len])))
        return runs

    @staticmethod
    def of_request(request: Request) -> list[Sequence]:
        """A request's sequences; all but the first wait for it to fill the prompt's blocks."""
        if not request.is_alone:
            request.hashes.extend(request.token_ids, request.row_digests)
        sequences = [Sequence(request, choice, request.hashes.fork(), request.token_ids) for choice in range(request.n)]
        for sibling in sequences[1:]:
            sibling.waits_for = sequences[0]
        for sequence in sequences:
            sequence.hidden_from = first_hidden(request.sampling, request.answer_start, sequence.choice)
        if request.sampling.grammar:
            for sequence, matcher in zip(sequences, request.matchers, strict=True):
                sequence.matcher = matcher
        return sequences
