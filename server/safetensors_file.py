"""Reads a safetensors file that holds exactly one tensor. Called by `embeddings`.

The format: the header's length (unsigned 64-bit, little-endian), the header (JSON), the values. The `safetensors`
package would do, but it copies, takes only a `bytes` object, and does not say *which* limit was broken.
"""

from __future__ import annotations

import json
from typing import Any

from server.file_tensor import ITEM_BYTES, UNSUPPORTED_DTYPE, EmbeddingError, FileLayout, FileTensor, RowLimits

MAX_HEADER_BYTES = 64 * 1024
"""One tensor needs about 100 bytes; the rest is room for `__metadata__`."""

_LENGTH_BYTES = 8
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def is_safetensors(payload: memoryview) -> bool:
    """The format has no magic number, but its header must start with a brace."""
    return payload[_LENGTH_BYTES : _LENGTH_BYTES + 1].tobytes() == b"{"


def read_safetensors(payload: memoryview, limits: RowLimits) -> FileTensor:
    """The file's one tensor, as a view of `payload`. Raises EmbeddingError."""
    return safetensors_layout(payload, limits).tensor(payload, limits.hidden_size)


def safetensors_layout(payload: memoryview, limits: RowLimits) -> FileLayout:
    """`payload`: the file's beginning, with the whole header. Raises EmbeddingError."""
    length = int.from_bytes(payload[:_LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise EmbeddingError(f"the safetensors header is longer than {MAX_HEADER_BYTES} bytes")
    if length > len(payload) - _LENGTH_BYTES:
        raise EmbeddingError("the safetensors header is longer than the file")
    header = _parse(payload[_LENGTH_BYTES : _LENGTH_BYTES + length])

    header.pop("__metadata__", None)
    if len(header) != 1:
        raise EmbeddingError(f"a safetensors file must hold exactly one tensor; this one holds {len(header)}")
    (entry,) = header.values()
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise EmbeddingError("the safetensors header must give the tensor's dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise EmbeddingError(UNSUPPORTED_DTYPE)
    if not isinstance(shape, list):
        raise EmbeddingError("the safetensors header's shape is not a list")
    rows = limits.num_rows(shape)
    size = rows * limits.hidden_size * ITEM_BYTES[_DTYPES[dtype]]
    # The format allows neither holes nor overlaps, so that one tensor's values are all that follows the header.
    if not isinstance(offsets, list) or [type(offset) for offset in offsets] != [int, int] or offsets != [0, size]:
        raise EmbeddingError(f"the safetensors header's data_offsets must be [0, {size}] for this shape and dtype")
    return FileLayout("safetensors", _LENGTH_BYTES + length, rows, _DTYPES[dtype])


def _parse(header: memoryview) -> dict[str, Any]:
    try:
        parsed = json.loads(str(header, "utf-8"), object_pairs_hook=_distinct, parse_constant=_no_constant)
    except (ValueError, RecursionError):  # not UTF-8, not JSON, an integer of 5,000 digits, nested too deeply
        parsed = None
    if not isinstance(parsed, dict):
        raise EmbeddingError("the safetensors header is not a JSON object with distinct keys")
    return parsed


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Two tensors of one name: which one is meant depends on the reader, so neither is."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("duplicate key")
    return found


def _no_constant(_: str) -> None:
    raise ValueError("NaN and Infinity are not JSON")
