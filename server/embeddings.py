"""Prompt embeddings as clients send them: a tensor in one of three file formats, raw or in base64. The routes call it
from a worker thread, never on the event loop.

| first bytes | format | read by |
|---|---|---|
| 8-byte length, `{` | safetensors with one tensor | `safetensors_file` |
| `\\x93NUMPY` | `.npy` | `npy_file` |
| `PK` | `torch.save(tensor)` (what vLLM's clients send) | `torch_file` |

What arrives is hostile until proven otherwise. Nothing is unpickled. Sizes are declared in headers, so they are
compared with the limits and with the payload's length before anything is allocated: decoding takes at most the base64's
decoded bytes and one copy of the rows, and of what has been decoded or copied the memory is given back at once (a
request's body is read only once). No message quotes content and nothing is logged.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pybase64

from server import npy_file, stored_zip
from server.file_tensor import ITEM_BYTES, EmbeddingError, FileTensor, RowLimits
from server.long_strings import LongString
from server.pages import allocate, discard, give_turn
from server.request_context import note_decoding
from server.row_values import cast_rows, row_digests
from server.safetensors_file import is_safetensors, read_safetensors
from server.torch_file import read_torch

__all__ = ["EmbeddingError", "Rows", "decode_base64_embedding", "decode_embedding"]

_ACCEPTED = (
    "a prompt embedding is one tensor [rows, hidden size] of float32, float16 or bfloat16"
    " as a safetensors, .npy or torch.save (zip) file"
)
_BASE64_BLOCK = 256 * 1024
"""Characters; a multiple of 4. pybase64 holds the GIL while it decodes (18 ms for 64 MiB), so other threads get it
between two blocks; blocks that stay in the cache are twice as fast as one call, and what a block becomes fits into
memory that the process has already."""
_TURN_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class Rows:
    """Embedding rows in the model's dtype, finite, ready to be sent to the runner."""

    data: memoryview = field(repr=False)
    """[num_rows, hidden_size], little-endian, C order, as read-only bytes. A view of the payload where nothing had to
    be cast: it keeps the payload alive, and a caller who passes a mutable payload must not change it."""
    num_rows: int
    hidden_size: int
    dtype: str
    """"float32", "float16" or "bfloat16"."""
    digests: bytes = field(repr=False)
    """[num_rows, 16]: one digest per row of `data`."""
    hint_ids: npt.NDArray[np.int32] | None = field(default=None, repr=False, compare=False)
    """[num_rows], where the client says which tokens the rows stand for: -1 where it does not."""


def decode_embedding(payload: bytes | memoryview, *, hidden_size: int, dtype: str, max_rows: int) -> Rows:
    """The rows of a file, [n, hidden_size] or [1, n, hidden_size] with 1 <= n <= max_rows, cast to `dtype` (a key of
    ITEM_BYTES, the model's). `payload`: contiguous bytes.

    Raises EmbeddingError for anything else: another format, shape or dtype, a damaged file, NaN or Inf, a value that
    does not fit `dtype`.
    """
    started = time.perf_counter()
    limits = RowLimits(hidden_size, max_rows)
    view = memoryview(payload).cast("B").toreadonly()
    if len(view) > limits.max_payload_bytes:
        raise EmbeddingError(_too_long(limits))
    tensor = _read(view, limits)
    data = cast_rows(tensor.data, hidden_size, tensor.dtype, dtype)
    digests = row_digests(data, hidden_size * ITEM_BYTES[dtype])
    note_decoding(time.perf_counter() - started)
    return Rows(data, tensor.num_rows, hidden_size, dtype, digests)


def decode_base64_embedding(text: str | bytes | memoryview, *, hidden_size: int, dtype: str, max_rows: int) -> Rows:
    """`decode_embedding` of a file in base64 (standard alphabet, padded, no line breaks, no `data:` URI).

    Raises EmbeddingError, also when `text` is longer than any file within the limits.
    """
    if isinstance(text, LongString):
        text = text.data
    limits = RowLimits(hidden_size, max_rows)
    if len(text) > (limits.max_payload_bytes + 2) // 3 * 4:
        raise EmbeddingError(_too_long(limits))
    started = time.perf_counter()
    payload = _decode_base64(text)
    note_decoding(time.perf_counter() - started)
    return decode_embedding(payload, hidden_size=hidden_size, dtype=dtype, max_rows=max_rows)


def _decode_base64(text: str | bytes | memoryview) -> memoryview:
    decoded = allocate(len(text) // 4 * 3)
    values, end = np.frombuffer(decoded, np.uint8), 0
    try:
        for start in range(0, len(text), _BASE64_BLOCK):
            if end != start // 4 * 3:  # padding inside of the text
                raise ValueError
            block = pybase64.b64decode(text[start : start + _BASE64_BLOCK], validate=True)
            values[end : end + len(block)] = np.frombuffer(block, np.uint8)  # without the GIL
            end += len(block)
            if isinstance(text, memoryview):
                discard(text[start : start + _BASE64_BLOCK])
            if start // _BASE64_BLOCK % _TURN_BLOCKS == 0:
                give_turn()
    except ValueError:  # binascii.Error is one
        raise EmbeddingError(
            "the prompt embedding is not valid base64: use the standard alphabet with padding,"
            " without line breaks and without a data: prefix"
        ) from None
    return decoded[:end]


def _read(payload: memoryview, limits: RowLimits) -> FileTensor:
    """Chooses the reader by the file's first bytes."""
    if payload[: len(npy_file.MAGIC)] == npy_file.MAGIC:
        return npy_file.read_npy(payload, limits)
    if payload[: len(stored_zip.MAGIC)] == stored_zip.MAGIC:
        return read_torch(payload, limits)
    if is_safetensors(payload):
        return read_safetensors(payload, limits)
    if payload[0:1].tobytes() == b"\x80":  # PROTO, the first opcode of a pickle
        raise EmbeddingError(
            f"a bare pickle or a torch.save file in torch's old (not zip) format is refused: {_ACCEPTED}"
        )
    raise EmbeddingError(f"the prompt embedding's format is not known: {_ACCEPTED}")


def _too_long(limits: RowLimits) -> str:
    return (
        f"the prompt embedding's file is longer than {limits.max_payload_bytes} bytes, which is enough for"
        f" {limits.max_rows} rows of {limits.hidden_size} float32 values"
        " (save a slice of a larger tensor as tensor.clone())"
    )
