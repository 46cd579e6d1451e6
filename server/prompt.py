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
        token_ids = np.full(rows.num_rows, EMBEDDING_ID, dtype=np.int32)
        return cls(token_ids, (Span(0, rows.num_rows),), rows.digests, (rows.data,))
