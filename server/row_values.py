"""The values of embedding rows: the check that they are finite, the cast to the model's dtype, the digests. Called by
`embeddings` and `row_pieces`, in a worker thread but for the last megabyte of a body.

All of it is numpy on the bit patterns, in blocks that stay in the cache, because numpy gives up the GIL in these loops
and the event loop goes on. ml_dtypes would cast to bfloat16 in one call, but it is slower and holds the GIL throughout;
`torch.isfinite` takes ten times as long as two maxima.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from runner.messages import DIGEST_BYTES
from server.file_tensor import ITEM_BYTES, EmbeddingError
from server.pages import allocate, discard

Array = npt.NDArray[Any]

BLOCK_BYTES = 1 << 20
"""Where something is cast, of float32: every cast goes through that."""

_FIRST_GROUP_ROWS = 16
"""Hashed in one call where an embedding begins: as many as a block of the prefix cache has, by default."""
_GROUP_BYTES = 256 * 1024
"""At most. A call gives up the GIL for two kilobytes and more, and has to get it back for the next one: beside an
event loop that receives, a thread that hashes little at a time waits most of its time."""
_GROUP_ROWS = 128
"""No more either: of two embeddings that part in a group, neither has the other's digests there."""
_GROUPS_BEFORE = 4
"""A group but the first ones has at most one row for so many before it."""

_INFINITY = {"float32": 0x7F80_0000, "float16": 0x7C00, "bfloat16": 0x7F80}
"""The bits of +Inf. Without its sign bit, every finite value's pattern is below it and every NaN's above it."""

_TOO_LARGE = {
    ("float32", "float16"): 0x477F_F000,  # 65520.0, halfway between float16's largest value and the next: rounds to Inf
    ("float32", "bfloat16"): 0x7F7F_8000,  # the same for bfloat16
    ("bfloat16", "float16"): 0x4780,  # 65536.0; the bfloat16 below it is 65280.0
}
"""The smallest positive pattern of the first dtype that a cast to the second makes infinite."""

# numpy's own casts from and to float16 take three and fifty times as long where float16 has a value as a subnormal
# number, one by one (it notes for each that something was lost): a body of these would hold up everything.
_FLOAT16 = np.arange(1 << 16, dtype="<u2").view("<f2").astype("<f4")
"""All that there are."""
_LEAST_NORMAL = 0x3880_0000
"""2**-14: what is smaller, float16 has as multiples of 2**-24."""
_NEARLY_NOTHING = 0x3080_0000
"""2**-30: becomes zero, as all does that is smaller. float32's own subnormal numbers would be slow."""


def cast_rows(
    data: memoryview,
    hidden_size: int,
    source: str,
    target: str,
    *,
    first_row: int = 0,
    out: memoryview | None = None,
) -> memoryview:
    """The rows in dtype `target`, rounded to nearest even as torch does; `data` itself where nothing is to be cast.

    `data`: [num_rows, hidden_size] in dtype `source`, little-endian, as bytes. Not to be read again where it was cast.
    `first_row`: which row of the embedding it begins with. `out`: memory for the result, as much as it takes.
    Raises EmbeddingError naming the first row that is not finite, or no longer is after the cast.
    """
    limit = _TOO_LARGE.get((source, target), _INFINITY[source])
    values = np.frombuffer(data, dtype=f"<u{ITEM_BYTES[source]}")
    made = out if source != target else None
    if source != target and made is None:
        made = allocate(values.size * ITEM_BYTES[target])
    cast = None if made is None else np.frombuffer(made, dtype=f"<u{ITEM_BYTES[target]}")
    step = BLOCK_BYTES // ITEM_BYTES[source if source == target else "float32"]
    for start in range(0, values.size, step):
        block = values[start : start + step]
        # Checked before the cast: rounding turns some NaNs into zeros.
        if _largest(block) >= limit:
            raise _refusal(block, first_row * hidden_size + start, hidden_size, source, target, limit)
        if cast is not None:
            _narrow(_widen(block, source), target, cast[start : start + step])
            discard(data[start * ITEM_BYTES[source] : (start + step) * ITEM_BYTES[source]])
    return data if made is None else made.toreadonly()


_is_hashing = True


def hash_rows(wanted: bool) -> None:
    """Whether this process's rows get digests: the prefix cache compares them, and without it nobody does."""
    global _is_hashing
    _is_hashing = wanted


def row_digests(data: memoryview, row_bytes: int, first_row: int = 0) -> bytes:
    """One digest of DIGEST_BYTES per row, concatenated; zeros if nobody asks for them (`hash_rows`).

    `data`: whole rows of `row_bytes` bytes, in the model's dtype; `first_row`: which row of the embedding it begins
    with, a multiple of `group_rows` there.

    Rows are hashed some together, fewer where an embedding begins, and a row's digest is that of its group with its
    place in the group. Which rows are a group follows from their places in the embedding alone: two embeddings that
    begin alike share the cache up to the last whole group that they have in common, and no group but the first ones
    has more than a quarter of what is before it. Rows that differ never have the same digests.

    BLAKE3 cut to 16 bytes: it hashes a tree, several kilobytes side by side. By 128 KiB, 64 MiB took 11 ms, sha256 38
    on a CPU with instructions for it, and blake2b(digest_size=16) 75.
    """
    if not _is_hashing:
        return bytes(len(data) // row_bytes * DIGEST_BYTES)
    digests: list[bytes] = []
    sizes: list[int] = []
    row, end = first_row, first_row + len(data) // row_bytes
    while row < end:
        size = min(group_rows(row, row_bytes), end - row)
        at = (row - first_row) * row_bytes
        digests.append(blake3(data[at : at + size * row_bytes]).digest()[:DIGEST_BYTES])
        sizes.append(size)
        row += size
    groups = np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, DIGEST_BYTES)
    counts = np.array(sizes, dtype=np.intp)
    rows = np.repeat(groups, counts, axis=0)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    rows[:, -1] ^= (np.arange(len(rows)) - starts).astype(np.uint8)
    return rows.tobytes()


def group_rows(row: int, row_bytes: int) -> int:
    """How many rows are hashed in one call from this one on: a power of two that `row` is a multiple of, where the
    groups before it have been such."""
    most = max_group_rows(row_bytes)
    size = min(_FIRST_GROUP_ROWS, most)
    while size < most and 2 * size * _GROUPS_BEFORE <= row:
        size *= 2
    return size


def max_group_rows(row_bytes: int) -> int:
    """Of any group of such rows."""
    size = _GROUP_ROWS
    while size > 1 and size * row_bytes > _GROUP_BYTES:
        size //= 2
    return size


def _largest(bits: Array) -> int:
    """The largest pattern without its sign bit: as unsigned integers the negative values' patterns are the largest, as
    signed ones the positive values'. Two plain maxima write no temporary."""
    sign = 1 << (8 * bits.itemsize - 1)
    unsigned = int(bits.max())
    signed = int(bits.view(f"<i{bits.itemsize}").max())
    return max(unsigned & ~sign, signed)


def _refusal(bits: Array, start: int, hidden_size: int, source: str, target: str, limit: int) -> EmbeddingError:
    magnitudes = bits & bits.dtype.type((1 << (8 * bits.itemsize - 1)) - 1)
    first = int((magnitudes >= limit).argmax())
    row = (start + first) // hidden_size
    if int(magnitudes[first]) >= _INFINITY[source]:
        return EmbeddingError(f"row {row} of the prompt embedding contains NaN or Inf")
    return EmbeddingError(f"row {row} of the prompt embedding has a value too large for this model's dtype, {target}")


def _widen(bits: Array, dtype: str) -> Array:
    """The block as float32. Exact."""
    if dtype == "bfloat16":  # the upper half of a float32
        return np.left_shift(bits, 16, dtype="<u4").view("<f4")
    return _FLOAT16.take(bits) if dtype == "float16" else bits.view("<f4")


def _narrow(values: Array, dtype: str, out: Array) -> None:
    """Writes the float32 block to `out` (bit patterns of `dtype`), rounded to nearest even."""
    bits = values.view("<u4")
    if dtype == "float16":
        out[:] = _float16_bits(bits)
    elif dtype == "bfloat16":
        rounded = bits >> 16
        rounded &= 1  # ties go to the even neighbour: half a unit, less one bit where the value is even already
        rounded += 0x7FFF
        rounded += bits
        rounded >>= 16
        out[:] = rounded
    else:
        out[:] = bits


def _float16_bits(bits: Array) -> Array:
    """Of float32's, as uint32. The patterns of float16 are counted from zero on: up to its smallest normal number, and
    from there on."""
    magnitudes = bits & 0x7FFF_FFFF
    below = np.clip(magnitudes, _NEARLY_NOTHING, _LEAST_NORMAL)
    halves = below.view("<f4")
    halves += np.float32(0.5)  # where float32, too, has multiples of 2**-24: rounds to them
    below -= 0x3F00_0000  # 0.5
    np.maximum(magnitudes, _LEAST_NORMAL, out=magnitudes)
    rounded = magnitudes >> 13
    rounded &= 1  # ties as above
    rounded += magnitudes
    rounded -= _LEAST_NORMAL - 0x0FFF
    rounded >>= 13
    rounded += below
    np.right_shift(bits, 16, out=below)
    below &= 0x8000
    rounded |= below
    return rounded
