"""Reads a `.npy` file (format versions 1, 2 and 3). Called by `embeddings`.

Not with `numpy.load`: that parses the header as a Python literal, unpickles object arrays and allocates what the header
declares. A header that holds one plain array is simple enough for a regular expression.
"""

from __future__ import annotations

import re

from server.file_tensor import BIG_ENDIAN, UNSUPPORTED_DTYPE, EmbeddingError, FileLayout, FileTensor, RowLimits

MAGIC = b"\x93NUMPY"
MAX_HEADER_BYTES = 4096

_DTYPES = {"<f4": "float32", "<f2": "float16"}
"""numpy has no bfloat16; extension packages write it as raw two-byte items, which could be anything."""

_LENGTH_BYTES = {1: 2, 2: 4, 3: 4}
"""Bytes of the header's length, by format version."""

# "'descr': '<f4'", "'fortran_order': False" or "'shape': (3, 8)", each with a comma behind it (optional for the last).
# A dimension is at most 19 digits long, so that int() takes no time.
_FIELD = re.compile(
    r"""\s*'(?:(?P<d>descr)'\s*:\s*'(?P<descr>[^']{1,8})'
          |(?P<o>fortran_order)'\s*:\s*(?P<order>True|False)
          |(?P<s>shape)'\s*:\s*\((?P<shape>(?:\s*\d{1,19}\s*,)*(?:\s*\d{1,19})?)\s*\))\s*(?:,|(?=\}))""",
    re.VERBOSE | re.ASCII,
)


def read_npy(payload: memoryview, limits: RowLimits) -> FileTensor:
    """The file's array, as a view of `payload`. Raises EmbeddingError."""
    return npy_layout(payload, limits).tensor(payload, limits.hidden_size)


def npy_layout(payload: memoryview, limits: RowLimits) -> FileLayout:
    """`payload`: the file's beginning, with the whole header. Raises EmbeddingError."""
    version = payload[len(MAGIC) : len(MAGIC) + 2]
    if len(version) != 2 or version[0] not in _LENGTH_BYTES or version[1] != 0:
        raise EmbeddingError("a .npy file must have the format version 1.0, 2.0 or 3.0")
    start = len(MAGIC) + 2 + _LENGTH_BYTES[version[0]]
    length = int.from_bytes(payload[len(MAGIC) + 2 : start], "little")
    if length > MAX_HEADER_BYTES:
        raise EmbeddingError(f"the .npy header is longer than {MAX_HEADER_BYTES} bytes")
    if length > len(payload) - start:
        raise EmbeddingError("the .npy header is longer than the file")
    descr, fortran_order, shape = _parse(bytes(payload[start : start + length]))

    if descr.startswith(">"):
        raise EmbeddingError(BIG_ENDIAN)
    if descr not in _DTYPES:
        raise EmbeddingError(f"{UNSUPPORTED_DTYPE} (bfloat16 as safetensors or torch.save, numpy has none)")
    if fortran_order:
        raise EmbeddingError("the .npy array is in Fortran order: send it in C order (numpy.ascontiguousarray)")
    rows = limits.num_rows(shape)
    return FileLayout(".npy", start + length, rows, _DTYPES[descr])


def _parse(header: bytes) -> tuple[str, bool, list[int]]:
    """The header's descr, fortran_order and shape. Raises EmbeddingError."""
    text = header.decode("latin-1").strip()
    found: dict[str, str] = {}
    at = 1
    while field := _FIELD.match(text, at):
        for mark, name in (("d", "descr"), ("o", "order"), ("s", "shape")):
            if field[mark]:
                if name in found:
                    raise EmbeddingError("the .npy header names a key twice")
                found[name] = field[name]
        at = field.end()
    if len(found) != 3 or not text.startswith("{") or text[at:].strip() != "}":
        raise EmbeddingError("the .npy header does not describe one plain array of numbers")
    return found["descr"], found["order"] == "True", [int(size) for size in found["shape"].split(",") if size.strip()]
