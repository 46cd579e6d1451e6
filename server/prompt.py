"""A prompt as the runner sees it: a list of rows, each a token id or an embedding. Built by the routes (`inputs`), sent
by the engine client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import numpy.typing as npt

from runner.messages import EMBEDDING_ID, Span
from server.row_memory import SharedMemory
from server.rows import Rows
from server.vision import PreparedImage


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows that the runner has already."""

    id: str
    num_rows: int
    hint_ids: npt.NDArray[np.int32] | None = field(default=None, repr=False, compare=False)
    """As `Rows.hint_ids`."""


Segment = Sequence[int] | Rows | StoredRows | PreparedImage


@dataclass(frozen=True, slots=True)
class PromptRows:
    """One prompt. The arrays are the raw frames that follow a `Generate` message."""

    token_ids: npt.NDArray[np.int32] = field(repr=False)
    """[num_rows], `EMBEDDING_ID` at embedding rows."""
    spans: tuple[Span, ...] = ()
    row_digests: bytes = field(default=b"", repr=False)
    """[num_embedding_rows, DIGEST_BYTES], without those of stored rows."""
    rows: tuple[memoryview | bytes, ...] = field(default=(), repr=False)
    """One buffer a span: [span.length, hidden_size], the model's dtype, C order; of an image, its pixels;
    empty for stored rows."""
    positions: npt.NDArray[np.int32] | None = field(default=None, repr=False)
    """[3, num_rows], where they aren't the rows' own places."""
    hint_ids: npt.NDArray[np.int32] | None = field(default=None, repr=False)
    """[num_embedding_rows]: the token that a row stands for, or `EMBEDDING_ID`. None: no row says so."""
    shared: tuple[SharedMemory | None, ...] = field(default=(), repr=False)
    """One a span: what `rows` is a view of, where the runner can read it. Empty: none is."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def from_token_ids(cls, token_ids: Sequence[int]) -> PromptRows:
        return cls(np.array(token_ids, dtype=np.int32))

    @classmethod
    def from_embedding(cls, rows: Rows) -> PromptRows:
        """A prompt that is one span of embedding rows and nothing else."""
        return cls.from_segments([rows])

    @classmethod
    def from_segments(cls, segments: Sequence[Segment]) -> PromptRows:
        """Token ids, embedding rows and images, one behind the other. Nothing is copied: each `Rows` is a span, as are
        stored ones and each image."""
        lengths = [
            each.num_rows if isinstance(each, Rows | StoredRows | PreparedImage) else len(each) for each in segments
        ]
        token_ids = np.full(sum(lengths), EMBEDDING_ID, dtype=np.int32)
        spans: list[Span] = []
        start = 0
        for segment, length in zip(segments, lengths, strict=True):
            if isinstance(segment, Rows):
                spans.append(Span(start, length))
            elif isinstance(segment, StoredRows):
                spans.append(Span(start, length, stored=segment.id))
            elif isinstance(segment, PreparedImage):
                spans.append(
                    Span(start, length, two_way=segment.two_way, pixels=segment.pixels.shape, grid=segment.grid)
                )
            else:
                token_ids[start : start + length] = segment
            start += length
        embedded = [each for each in segments if isinstance(each, Rows | StoredRows | PreparedImage)]
        digests = b"".join(each.digests for each in embedded if not isinstance(each, StoredRows))
        frames = tuple(map(_frame, embedded))
        hint_ids = None
        if any(isinstance(each, Rows | StoredRows) and each.hint_ids is not None for each in embedded):
            hint_ids = np.concatenate([_hint_ids(each) for each in embedded])
        shared = tuple(each.shared if isinstance(each, Rows) else None for each in embedded)
        return cls(token_ids, tuple(spans), digests, frames, _positions(segments, lengths), hint_ids, shared)

    def behind(self, rows: Rows) -> PromptRows:
        """This prompt with `rows` before it. No row is copied."""
        length = rows.num_rows
        positions, hint_ids = self.positions, self.hint_ids
        if positions is not None:
            before = np.broadcast_to(np.arange(length, dtype=np.int32), (3, length))
            positions = np.ascontiguousarray(np.concatenate([before, positions + length], 1), dtype=np.int32)
        if hint_ids is not None:
            hint_ids = np.concatenate([_hint_ids(rows), hint_ids])
        return PromptRows(
            np.concatenate([np.full(length, EMBEDDING_ID, dtype=np.int32), self.token_ids]),
            (Span(0, length), *(msgspec.structs.replace(span, start=span.start + length) for span in self.spans)),
            rows.digests + self.row_digests,
            (rows.data, *self.rows),
            positions,
            hint_ids,
            (rows.shared, *(self.shared or (None,) * len(self.spans))),
        )

    @property
    def tail_ids(self) -> npt.NDArray[np.int32]:
        """The token ids behind the last embedding row; all of them where there is none."""
        return self.token_ids[self.spans[-1].start + self.spans[-1].length :] if self.spans else self.token_ids

    def sharing(self) -> PromptRows:
        """The same for a runner that reads shared memory: the spans say where it is."""
        if not any(self.shared):
            return self
        spans = tuple(
            span if memory is None else msgspec.structs.replace(span, shared=memory.told)
            for span, memory in zip(self.spans, self.shared, strict=True)
        )
        rows = tuple(b"" if memory else rows for rows, memory in zip(self.rows, self.shared, strict=True))
        return replace(self, spans=spans, rows=rows)

    @property
    def frames(self) -> list[bytes | memoryview]:
        """What follows the `Generate` message, in its order."""
        hints = [] if self.hint_ids is None else [self.hint_ids.data]
        positions = [] if self.positions is None else [self.positions.data.cast("B")]
        return [self.token_ids.data, self.row_digests, *hints, *positions, *self.rows]


def _hint_ids(rows: Rows | StoredRows | PreparedImage) -> npt.NDArray[np.int32]:
    given = rows.hint_ids if isinstance(rows, Rows | StoredRows) else None
    return np.full(rows.num_rows, EMBEDDING_ID, dtype=np.int32) if given is None else given


def _frame(rows: Rows | StoredRows | PreparedImage) -> memoryview | bytes:
    if isinstance(rows, StoredRows):
        return b""
    return rows.data if isinstance(rows, Rows) else rows.pixels.data.cast("B")


def _positions(segments: Sequence[Segment], lengths: Sequence[int]) -> npt.NDArray[np.int32] | None:
    """The position ids of M-RoPE (Wang et al. 2024, arXiv:2409.12191): a text's rows have one number in all three
    dimensions; an image's rows count time, height and width from where the text left off, and what follows goes on
    behind the largest."""
    if not any(isinstance(each, PreparedImage) and each.grid for each in segments):
        return None
    parts, at = [], 0
    for segment, length in zip(segments, lengths, strict=True):
        if isinstance(segment, PreparedImage) and segment.grid:
            time, height, width = segment.grid
            sides = (time, height // segment.merge_size, width // segment.merge_size)
            parts.append(at + np.indices(sides, dtype=np.int32).reshape(3, -1))
            at += segment.side
        else:
            parts.append(np.broadcast_to(np.arange(at, at + length, dtype=np.int32), (3, length)))
            at += length
    return np.ascontiguousarray(np.concatenate(parts, 1), dtype=np.int32)
