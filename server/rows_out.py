"""Rows on their way out: as a safetensors file, raw or in base64 inside of a JSON object. Used for hidden states
(`hidden_states`) and for the model's own input rows (`token_embeddings`).

An answer may hold a hundred megabytes of them. So they are never a Python list of numbers, are encoded in a thread, and
are counted: `check_size` against what one answer may hold, `answer_memory` against what all answers of a process may.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pybase64

from server.errors import InvalidRequest

MAX_ROW_BYTES = 128 << 20
"""Of one answer, before base64."""

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_BASE64_BLOCK = 3 << 18
"""Bytes, a multiple of 3. pybase64 holds the GIL: the event loop must have its turn between two blocks."""


@dataclass(frozen=True, slots=True)
class RowsOut:
    """One tensor, [num_rows, hidden_size]."""

    name: str
    """The tensor's, in the file."""
    parts: Sequence[bytes | memoryview]
    """Its bytes in C order."""
    num_rows: int
    hidden_size: int
    dtype: str
    """"float32", "float16" or "bfloat16"."""

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.parts))

    def file(self) -> bytes:
        """As safetensors."""
        entry = {
            "dtype": _DTYPES[self.dtype],
            "shape": [self.num_rows, self.hidden_size],
            "data_offsets": [0, self.nbytes],
        }
        header = json.dumps({self.name: entry}, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)  # so that the values are aligned
        return b"".join([len(header).to_bytes(8, "little"), header, *self.parts])

    def body(self) -> dict[str, Any]:
        """The JSON object that carries it. Takes a while: call it in a thread where there are many rows."""
        return {
            "data": as_base64(self.file()),
            "rows": self.num_rows,
            "hidden": self.hidden_size,
            "dtype": self.dtype,
        }


def as_base64(data: bytes) -> msgspec.Raw:
    """As a JSON string, which the encoder need not look through once more."""
    view = memoryview(data)
    blocks = (pybase64.b64encode(view[at : at + _BASE64_BLOCK]) for at in range(0, len(view), _BASE64_BLOCK))
    return msgspec.Raw(b"".join([b'"', *blocks, b'"']))


def check_size(num_rows: int, row_bytes: int, *, param: str, advice: str) -> int:
    """The bytes of so many rows. Raises InvalidRequest where one answer can't hold them; `advice`: what to do then."""
    nbytes = num_rows * row_bytes
    if nbytes > MAX_ROW_BYTES:
        raise InvalidRequest(
            f"{param}: one answer can hold {MAX_ROW_BYTES // row_bytes} rows of {row_bytes} bytes ({MAX_ROW_BYTES}"
            f" bytes), and this one could have {num_rows}. {advice}",
            param=param,
        )
    return nbytes
