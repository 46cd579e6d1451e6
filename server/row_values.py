"""The values of embedding rows: the check that they are finite, the cast to the model's dtype, the digests. Called by
`embeddings`, in a worker thread.

All of it is numpy on the bit patterns, in blocks that stay in the cache, because numpy gives up the GIL in these loops
and the event loop goes on. ml_dtypes would cast to bfloat16 in one call, but it is slower and holds the GIL throughout;
`torch.isfinite` takes ten times as long as two maxima.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt

from runner.messages import DIGEST_BYTES
from server.file_tensor import ITEM_BYTES, EmbeddingError
from server.pages import allocate, discard, give_turn

Array = npt.NDArray[Any]

BLOCK_BYTES = 1 << 20

_LONG_ROW_BYTES = 4096
_UNLOCKED_BYTES = 2048
"""hashlib gives up the GIL for so many bytes in one call; fewer are hashed under it,"""
_LOCKED_BYTES = 512 * 1024
"""and so many bytes of them at a stretch: less than a millisecond. Then the event loop gets its turn, which it would
have to ask for and wait five milliseconds."""

_INFINITY = {"float32": 0x7F80_0000, "float16": 0x7C00, "bfloat16": 0x7F80}
"""The bits of +Inf. Without its sign bit, every finite value's pattern is below it and every NaN's above it."""

_TOO_LARGE = {
    ("float32", "float16"): 0x477F_F000,  # 65520.0, halfway between float16's largest value and the next: rounds to Inf
    ("float32", "bfloat16"): 0x7F7F_8000,  # the same for bfloat16
    ("bfloat16", "float16"): 0x4780,  # 65536.0; the bfloat16 below it is 65280.0
}
"""The smallest positive pattern of the first dtype that a cast to the second makes infinite."""


def cast_rows(data: memoryview, hidden_size: int, source: str, target: str) -> memoryview:
    """The rows in dtype `target`, rounded to nearest even as torch does; `data` itself where nothing is to be cast.

    `data`: [num_rows, hidden_size] in dtype `source`, little-endian, as bytes. Not to be read again where it was cast.
    Raises EmbeddingError naming the first row that is not finite, or no longer is after the cast.
    """
    limit = _TOO_LARGE.get((source, target), _INFINITY[source])
    values = np.frombuffer(data, dtype=f"<u{ITEM_BYTES[source]}")
    made = None if source == target else allocate(values.size * ITEM_BYTES[target])
    cast = None if made is None else np.frombuffer(made, dtype=f"<u{ITEM_BYTES[target]}")
    step = BLOCK_BYTES // ITEM_BYTES[source]
    for start in range(0, values.size, step):
        block = values[start : start + step]
        # Checked before the cast: rounding turns some NaNs into zeros.
        if _largest(block) >= limit:
            raise _refusal(block, start, hidden_size, source, target, limit)
        if cast is not None:
            _narrow(_widen(block, source), target, cast[start : start + step])
            discard(data[start * ITEM_BYTES[source] : (start + step) * ITEM_BYTES[source]])
    return data if made is None else made.toreadonly()


def row_digests(data: memoryview, row_bytes: int) -> bytes:
    """One digest of DIGEST_BYTES per row, concatenated. `data`: whole rows of `row_bytes` bytes, in the model's dtype.

    Short rows are hashed a few together, from the first one on, and a row's digest is that of its group with its place
    in the group: a call takes as long as hashing a kilobyte does. So two embeddings that begin alike share the cache
    up to the last whole group that they have in common; rows that differ never have the same digests.

    sha256 cut to 16 bytes, because it was the faster one on a CPU with SHA instructions: 64 MiB of 8 KiB rows take
    42 ms where blake2b(digest_size=16) takes 75; of 1 KiB rows one by one 70 ms, by fours 46.
    """
    together = _rows_together(row_bytes)
    step = together * row_bytes
    digests: list[bytes] = []
    for first in range(0, len(data), _LOCKED_BYTES // step * step or step):
        block = data[first : first + (_LOCKED_BYTES // step * step or step)]
        digests += [sha256(block[at : at + step]).digest()[:DIGEST_BYTES] for at in range(0, len(block), step)]
        if step < _UNLOCKED_BYTES:
            give_turn()
    if together == 1:
        return b"".join(digests)
    groups = np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, 1, DIGEST_BYTES)
    rows = np.repeat(groups, together, axis=1)
    rows[:, :, -1] ^= np.arange(together, dtype=np.uint8)
    return rows.tobytes()[: len(data) // row_bytes * DIGEST_BYTES]


def _rows_together(row_bytes: int) -> int:
    """How many rows are hashed in one call. It divides a block of the cache, so that an embedding at the beginning of a
    block shares no less than with a digest of each row."""
    return 1 if row_bytes >= _LONG_ROW_BYTES else 2 if 2 * row_bytes >= _LONG_ROW_BYTES else 4


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
    return bits.view(f"<f{bits.itemsize}").astype("<f4", copy=False)


def _narrow(values: Array, dtype: str, out: Array) -> None:
    """Writes the float32 block to `out` (bit patterns of `dtype`), rounded to nearest even."""
    if dtype == "bfloat16":
        bits = values.view("<u4")
        rounded = bits >> 16
        rounded &= 1  # ties go to the even neighbour: half a unit, less one bit where the value is even already
        rounded += 0x7FFF
        rounded += bits
        rounded >>= 16
        out[:] = rounded
    else:
        out.view(f"<f{out.itemsize}")[:] = values
