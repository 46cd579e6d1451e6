"""One tensor inside a client's file, and the limits it must keep. Shared by the readers of the three file formats
(`safetensors_file`, `npy_file`, `torch_file`), which `embeddings` calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of one value, for every dtype that a prompt embedding may have on the wire and in the model."""

UNSUPPORTED_DTYPE = "the prompt embedding's dtype is not accepted: send float32, float16 or bfloat16"
BIG_ENDIAN = "the prompt embedding's values are big-endian: send little-endian values"

_MAX_DIMENSION = 2**63 - 1


class EmbeddingError(ValueError):
    """A prompt embedding that is refused. The message is meant for the client: it names the limit, is at most 1 KB, and
    quotes nothing of the payload but sizes."""


class TooManyRows(EmbeddingError):
    """More rows than `max_rows`: of all refusals the one that means a prompt longer than the context."""


@dataclass(frozen=True, slots=True)
class RowLimits:
    """What every prompt embedding must keep: rows of `hidden_size` values, 1 to `max_rows` of them."""

    hidden_size: int
    max_rows: int

    def num_rows(self, shape: Sequence[object]) -> int:
        """The number of rows of a tensor with this declared shape: [n, hidden] or [1, n, hidden].

        It is called before a byte of the tensor is read, with whatever stood in the client's header.
        Raises EmbeddingError when the shape breaks a limit.
        """
        if len(shape) not in (2, 3):
            raise EmbeddingError(
                f"a prompt embedding has the shape [rows, {self.hidden_size}] or [1, rows, {self.hidden_size}];"
                f" this one has {len(shape)} dimension{'' if len(shape) == 1 else 's'}"
            )
        sizes: list[int] = []
        for size in shape:
            # `type is int`: a bool is an int to isinstance, and JSON and pickle can both say True.
            if type(size) is not int or not 0 <= size <= _MAX_DIMENSION:
                raise EmbeddingError("the prompt embedding's shape is not made of non-negative 64-bit integers")
            sizes.append(size)
        if len(sizes) == 3 and sizes[0] != 1:
            raise EmbeddingError(f"a prompt embedding holds one prompt; this one has a leading dimension of {sizes[0]}")
        rows, width = sizes[-2:]
        if width != self.hidden_size:
            raise EmbeddingError(
                f"the prompt embedding's rows are {width} wide; this model's hidden size is {self.hidden_size}"
            )
        if rows == 0:
            raise EmbeddingError("the prompt embedding has no rows")
        if rows > self.max_rows:
            raise TooManyRows(f"the prompt embedding has {rows} rows; at most {self.max_rows} are accepted")
        return rows

    @property
    def max_payload_bytes(self) -> int:
        """The largest file that is looked at: the most rows, in the widest dtype, and room for headers."""
        return self.max_rows * self.hidden_size * ITEM_BYTES["float32"] + HEADER_ROOM


HEADER_ROOM = 128 * 1024
"""Bytes that a file may have besides its rows. The readers bound each header well below it."""


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor as a file holds it. Nothing has been copied: `data` is a view of the payload."""

    data: memoryview
    """The values, [num_rows, hidden_size], little-endian, C order, as bytes; exactly as long as the shape says."""
    num_rows: int
    dtype: str
    """A key of ITEM_BYTES."""


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Where a file's values are, as its header says; what it says is within the limits."""

    name: str
    """What the header is called in errors."""
    start: int
    """The values' first byte."""
    num_rows: int
    dtype: str
    """A key of ITEM_BYTES."""

    def tensor(self, payload: memoryview, hidden_size: int) -> FileTensor:
        """Of the whole file. Raises EmbeddingError."""
        values, size = payload[self.start :], self.num_rows * hidden_size * ITEM_BYTES[self.dtype]
        if len(values) != size:
            raise EmbeddingError(self.wrong_size(size, len(values)))
        return FileTensor(values, self.num_rows, self.dtype)

    def wrong_size(self, promised: int, found: int) -> str:
        return f"the {self.name} header promises {promised} bytes of values; {found} follow it"
