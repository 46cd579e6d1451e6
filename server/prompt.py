"""A prompt as the runner sees it: a list of rows, each a token id or an embedding. Built by the routes (`inputs`), sent
by the engine client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from runner.messages import EMBEDDING_ID, Span
from server.embeddings import Rows


@dataclass(frozen=True, slots=True)
class PromptRows:
    """One prompt. The arrays are the raw frames that follow a `Generate` message."""

    token_ids: npt.NDArray[np.int32] = field(repr=False)
    """[num_rows], `EMBEDDING_ID` at embedding rows."""
    spans: tuple[Span, ...] = ()
    row_digests: bytes = field(default=b"", repr=False)
    """[num_embedding_rows, DIGEST_BYTES]."""
    rows: tuple[memoryview | bytes, ...] = field(default=(), repr=False)
    """One buffer a span: [span.length, hidden_size], the model's dtype, C order."""

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
    def from_segments(cls, segments: Sequence[Sequence[int] | Rows]) -> PromptRows:
        """Token ids and embedding rows, one behind the other. The rows are not copied: each `Rows` is a span."""
        lengths = [each.num_rows if isinstance(each, Rows) else len(each) for each in segments]
        token_ids = np.full(sum(lengths), EMBEDDING_ID, dtype=np.int32)
        spans: list[Span] = []
        start = 0
        for segment, length in zip(segments, lengths, strict=True):
            if isinstance(segment, Rows):
                spans.append(Span(start, length))
            else:
                token_ids[start : start + length] = segment
            start += length
        embedded = [each for each in segments if isinstance(each, Rows)]
        digests = b"".join(each.digests for each in embedded)
        return cls(token_ids, tuple(spans), digests, tuple(each.data for each in embedded))

    @property
    def tail_ids(self) -> npt.NDArray[np.int32]:
        """The token ids behind the last embedding row; all of them where there is none."""
        return self.token_ids[self.spans[-1].start + self.spans[-1].length :] if self.spans else self.token_ids
