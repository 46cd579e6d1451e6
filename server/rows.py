"""Embedding rows that are ready for the runner: what `embeddings` and `arriving_file` make, and `prompt` puts into
prompts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from server.row_memory import SharedMemory


@dataclass(frozen=True, slots=True)
class Rows:
    """Embedding rows in the model's dtype, finite, ready to be sent to the runner."""

    data: memoryview = field(repr=False)
    """[num_rows, hidden_size], little-endian, C order, as read-only bytes. A view of the payload where they are few and
    nothing had to be cast: it keeps the payload alive, and a caller who passes a mutable payload must not change it."""
    num_rows: int
    hidden_size: int
    dtype: str
    """"float32", "float16" or "bfloat16"."""
    digests: bytes = field(repr=False)
    """[num_rows, 16]: one digest per row of `data`."""
    hint_ids: npt.NDArray[np.int32] | None = field(default=None, repr=False, compare=False)
    """[num_rows], where the client says which tokens the rows stand for: -1 where it does not."""
    sha256: str = field(default="", repr=False, compare=False)
    """Of `data`, in hexadecimal, where it was asked for and made with the rows."""
    shared: SharedMemory | None = field(default=None, repr=False, compare=False)
    """What `data` is a view of, where the runner can read it."""
