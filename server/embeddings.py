"""Prompt embeddings as clients send them: a tensor in one of three file formats, raw or in base64. The routes call it
from a worker thread, never on the event loop.

| first bytes | format | read by |
|---|---|---|
| 8-byte length, `{` | safetensors with one tensor | `safetensors_file` |
| `\\x93NUMPY` | `.npy` | `npy_file` |
| `PK` | `torch.save(tensor)` (what vLLM's clients send) | `torch_file` |

What arrives is hostile until proven otherwise. Nothing is unpickled. Sizes are declared in headers, so they are
compared with the limits and with the payload's length before anything is allocated. A large file is made into rows
piece by piece (`row_pieces`); of what has been decoded or copied the memory is given back at once (a request's body is
read only once). What arrives as a file is begun before it is complete (`arriving_file`). No message quotes content and
nothing is logged.
"""

from __future__ import annotations

import time

import numpy as np
import pybase64

from server import npy_file, stored_zip
from server.file_tensor import ITEM_BYTES, EmbeddingError, FileLayout, FileTensor, RowLimits
from server.long_strings import LongString
from server.pages import SMALL_BYTES, allocate, discard, give_turn
from server.request_context import note_decoding
from server.row_pieces import RowPieces, make_all
from server.row_values import cast_rows, row_digests
from server.rows import Rows
from server.safetensors_file import is_safetensors, read_safetensors, safetensors_layout
from server.torch_file import read_torch

__all__ = ["NOT_BASE64", "EmbeddingError", "Rows", "decode_base64_embedding", "decode_embedding"]

_ACCEPTED = (
    "a prompt embedding is one tensor [rows, hidden size] of float32, float16 or bfloat16"
    " as a safetensors, .npy or torch.save (zip) file"
)
_BASE64_BLOCK = 256 * 1024
"""Characters; a multiple of 4. pybase64 holds the GIL while it decodes (18 ms for 64 MiB), so other threads get it
between two blocks; blocks that stay in the cache are twice as fast as one call, and what a block becomes fits into
memory that the process has already."""
_TURN_BLOCKS = 4
_IN_PIECES = 512 * 1024
"""Characters. Longer texts are decoded in pieces, by several threads; more than any header takes."""
NOT_BASE64 = (
    "the prompt embedding is not valid base64: use the standard alphabet with padding,"
    " without line breaks and without a data: prefix"
)


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
    rows = _rows_of(tensor, hidden_size, dtype)
    note_decoding(time.perf_counter() - started)
    return rows


def layout_of(head: memoryview, limits: RowLimits) -> FileLayout | None:
    """Where the values of a file are that begins with `head`, which has the whole header; None where that can't be told
    yet. Raises EmbeddingError for a header that is refused."""
    if head[: len(npy_file.MAGIC)] == npy_file.MAGIC:
        return npy_file.npy_layout(head, limits)
    if head[: len(stored_zip.MAGIC)] == stored_zip.MAGIC or not is_safetensors(head):
        return None
    return safetensors_layout(head, limits)


def _rows_of(tensor: FileTensor, hidden_size: int, dtype: str) -> Rows:
    if tensor.num_rows * hidden_size * ITEM_BYTES[dtype] > SMALL_BYTES:
        pieces = RowPieces(tensor.num_rows, hidden_size, tensor.dtype, dtype)
        return make_all(pieces, lambda start, end: (tensor.data[start:end],))
    data = cast_rows(tensor.data, hidden_size, tensor.dtype, dtype)
    return Rows(data, tensor.num_rows, hidden_size, dtype, row_digests(data, hidden_size * ITEM_BYTES[dtype]))


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
    try:
        rows = _decode_in_pieces(text, limits, dtype) if len(text) > _IN_PIECES else None
        if rows is None:
            payload = _decode_base64(text)
    except ValueError as error:  # binascii.Error is one
        raise error if isinstance(error, EmbeddingError) else EmbeddingError(NOT_BASE64) from None
    note_decoding(time.perf_counter() - started)
    return rows or decode_embedding(payload, hidden_size=hidden_size, dtype=dtype, max_rows=max_rows)


def _decode_in_pieces(text: str | bytes | memoryview, limits: RowLimits, dtype: str) -> Rows | None:
    """None where the file doesn't begin with what says where its values are. Raises ValueError."""
    layout = layout_of(memoryview(_decode_block(text, 0, _IN_PIECES)), limits)
    if layout is None:
        return None
    if len(text) % 4:
        raise ValueError
    end = text[-2:] if isinstance(text, str) else str(text[-2:], "ascii")
    pieces = RowPieces(layout.num_rows, limits.hidden_size, layout.dtype, dtype)
    size, found = layout.num_rows * pieces.source_bytes, len(text) // 4 * 3 - end.count("=") - layout.start
    if found != size:
        raise EmbeddingError(layout.wrong_size(size, found))
    return make_all(pieces, lambda start, end: _decoded(text, layout.start + start, layout.start + end))


def _decoded(text: str | bytes | memoryview, start: int, end: int) -> list[memoryview]:
    """Bytes `start` to `end` of the file. Raises ValueError."""
    first, last = start // 3 * 4, -(-end // 3) * 4
    blocks = [
        memoryview(_decode_block(text, at, min(at + _BASE64_BLOCK, last))) for at in range(first, last, _BASE64_BLOCK)
    ]
    if isinstance(text, memoryview):
        discard(text[first + 4 : last - 4])  # the pieces before and behind may begin and end within four characters
    blocks[0] = blocks[0][start % 3 :]
    surplus = sum(map(len, blocks)) - (end - start)
    blocks[-1] = blocks[-1][: len(blocks[-1]) - surplus]
    return blocks


def _decode_block(text: str | bytes | memoryview, start: int, end: int) -> bytes:
    """`start`, `end`: multiples of 4. Raises ValueError."""
    block = pybase64.b64decode(text[start:end], validate=True)
    if len(block) != (end - start) // 4 * 3 and end < len(text):  # padding inside of the text
        raise ValueError
    return block


def _decode_base64(text: str | bytes | memoryview) -> memoryview:
    """Raises ValueError."""
    decoded = allocate(len(text) // 4 * 3)
    values, at = np.frombuffer(decoded, np.uint8), 0
    for start in range(0, len(text), _BASE64_BLOCK):
        block = _decode_block(text, start, min(start + _BASE64_BLOCK, len(text)))
        values[at : at + len(block)] = np.frombuffer(block, np.uint8)  # without the GIL
        at += len(block)
        if isinstance(text, memoryview):
            discard(text[start : start + _BASE64_BLOCK])
        if start // _BASE64_BLOCK % _TURN_BLOCKS == 0:
            give_turn()
    return decoded[:at]


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
