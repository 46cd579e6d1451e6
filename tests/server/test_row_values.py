"""Casts are torch's bit for bit, what is not finite is named by its row, digests are of the row's bytes."""

from __future__ import annotations

import tracemalloc
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch

from server.row_values import BLOCK_BYTES, cast_rows, max_group_rows, row_digests
from tests.server import embedding_files as files
from tests.server.embedding_files import TORCH_DTYPES, refusal

BITS = {"float32": torch.int32, "float16": torch.int16, "bfloat16": torch.int16}
PAIRS = list(product(TORCH_DTYPES, TORCH_DTYPES))


def patterns(dtype: str) -> torch.Tensor:
    """All 65,536 patterns of a 16-bit dtype; for float32 every upper half with the lower halves around a tie."""
    upper = torch.arange(0x10000, dtype=torch.int64)
    if dtype != "float32":
        return upper.to(torch.int16).view(TORCH_DTYPES[dtype])
    lower = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    return ((upper[:, None] << 16) | lower).to(torch.int32).view(torch.float32).flatten()


def view(tensor: torch.Tensor) -> memoryview:
    return memoryview(files.raw(tensor))


def cast(tensor: torch.Tensor, source: str, target: str, hidden_size: int = 1) -> bytes:
    return bytes(cast_rows(view(tensor), hidden_size, source, target))


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_cast_is_torchs(source: str, target: str) -> None:
    values = patterns(source)
    expected = values.to(TORCH_DTYPES[target])
    finite = expected.isfinite()
    assert int(finite.sum()) > 36_000
    assert cast(values[finite], source, target) == files.raw(expected[finite])


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_no_value_takes_its_own_time(source: str, target: str) -> None:
    """numpy's cast to float16 notes for each value that it was too small, which takes fifty times as long as the cast:
    a body of nothing else would hold up the event loop."""
    small = patterns(source)
    small = small[small.abs() < 1e-4]
    with np.errstate(all="raise"):
        assert cast(small, source, target) == files.raw(small.to(TORCH_DTYPES[target]))


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_value_that_does_not_stay_finite_is_refused(source: str, target: str) -> None:
    values = patterns(source)
    overflows = ~values.to(TORCH_DTYPES[target]).isfinite() & values.isfinite()
    assert bool(overflows.any()) == (
        (source, target) in {("float32", "float16"), ("float32", "bfloat16"), ("bfloat16", "float16")}
    )
    for value in values[overflows][:: max(1, int(overflows.sum()) // 100)]:
        refusal(partial(cast, value, source, target), f"row 0 .* too large for .* {target}")
    for value in values[~values.isfinite()][::17]:
        refusal(partial(cast, value, source, target), "row 0 .* contains NaN or Inf")


@pytest.mark.parametrize(
    ("target", "largest", "first_too_large"),
    [("float16", 0x477F_EFFF, 0x477F_F000), ("bfloat16", 0x7F7F_7FFF, 0x7F7F_8000)],
)
@pytest.mark.parametrize("sign", [0, -(2**31)])
def test_the_limit_of_a_cast_is_exact(target: str, largest: int, first_too_large: int, sign: int) -> None:
    fits, too_large = torch.tensor([largest + sign, first_too_large + sign], dtype=torch.int32).view(torch.float32)
    assert cast(fits, "float32", target) == files.raw(fits.to(TORCH_DTYPES[target]))
    refusal(lambda: cast(too_large, "float32", target), f"too large for .* {target}")


@pytest.mark.parametrize(("source", "target"), PAIRS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("row", "column"), [(0, 0), (2, 3), (2, 4), (6, 4)])
def test_the_row_that_is_not_finite_is_named(source: str, target: str, value: float, row: int, column: int) -> None:
    tensor = torch.full((7, 5), -1.0, dtype=TORCH_DTYPES[source])
    tensor[row, column] = value
    refusal(lambda: cast(tensor, source, target, 5), f"row {row} of the prompt embedding contains NaN or Inf")


@pytest.mark.parametrize("pattern", [0x7F80_0001, 0x7FFF_FFFF, -1, -0x7F_FFFF])
def test_nans_that_rounding_would_make_finite_are_refused(pattern: int) -> None:
    values = torch.tensor([pattern], dtype=torch.int32).view(torch.float32)
    assert values.isnan().all()
    refusal(lambda: cast(values, "float32", "bfloat16"), "row 0 .* contains NaN or Inf")


@pytest.mark.parametrize("source", TORCH_DTYPES)
def test_rows_beyond_the_first_block_are_cast_and_checked(source: str) -> None:
    hidden_size = 1000  # blocks end inside of a row
    tensor = files.rows(2 * BLOCK_BYTES // 1000 + 7, hidden_size, dtype=source)
    for target in TORCH_DTYPES:
        assert cast(tensor, source, target, hidden_size) == files.raw(tensor.to(TORCH_DTYPES[target]))
    tensor[-2, 17] = float("inf")
    for target in TORCH_DTYPES:
        refusal(partial(cast, tensor, source, target, hidden_size), f"row {len(tensor) - 2} ")


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_without_a_cast_nothing_is_copied(dtype: str) -> None:
    data = view(files.rows(dtype=dtype))
    assert cast_rows(data, files.HIDDEN, dtype, dtype) is data


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_values_that_are_not_aligned_are_cast(source: str, target: str) -> None:
    tensor = files.rows(50, dtype=source)
    shifted = memoryview(b"x" + files.raw(tensor))[1:]
    assert bytes(cast_rows(shifted, 50, source, target)) == files.raw(tensor.to(TORCH_DTYPES[target]))


@pytest.mark.parametrize(("source", "target"), [pair for pair in PAIRS if pair[0] != pair[1]])
def test_a_cast_allocates_its_result_and_little_else(source: str, target: str) -> None:
    tensor = files.rows(16, 1 << 18, dtype=source)
    data = view(tensor)
    tracemalloc.start()
    try:
        result = cast_rows(data, 1 << 18, source, target)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < len(result) + 6 * BLOCK_BYTES


def test_casts_are_read_only() -> None:
    assert cast_rows(view(files.rows()), files.HIDDEN, "float32", "float16").readonly


@pytest.mark.parametrize("row_bytes", [2, 128, 2047, 2048, 4095, 4096, 8192])
def test_digests_are_of_the_rows_bytes(row_bytes: int) -> None:
    for rows in (1, 3, 4, 9):
        data = np.random.default_rng(0).bytes(rows * row_bytes)
        found = row_digests(memoryview(data), row_bytes)
        assert found == files.digests(data, row_bytes)
        assert len({found[at : at + 16] for at in range(0, len(found), 16)}) == rows


@pytest.mark.parametrize("row_bytes", [100, 1152, 2048, 5000, 300_000])
def test_digests_of_many_rows(row_bytes: int) -> None:
    """Through groups of every size, the last one not a whole one."""
    data = np.random.default_rng(0).bytes((5_300_000 // row_bytes + 1) * row_bytes)
    found = row_digests(memoryview(data), row_bytes)
    assert found == files.digests(data, row_bytes)
    assert len({found[at : at + 16] for at in range(0, len(found), 16)}) == len(data) // row_bytes


@pytest.mark.parametrize("row_bytes", [2, 1024, 2048, 4096])
def test_where_an_embedding_is_cut_changes_no_digest(row_bytes: int) -> None:
    group = max_group_rows(row_bytes)
    rows = 5 * group + 3
    data = memoryview(np.random.default_rng(0).bytes(row_bytes * rows))
    whole = row_digests(data, row_bytes)
    for at in range(0, rows, group):
        assert row_digests(data[at * row_bytes :], row_bytes, at) == whole[at * 16 :]


@pytest.mark.parametrize("row_bytes", [128, 2048, 4096, 8192])
def test_what_begins_alike_shares_nearly_all_of_it(row_bytes: int) -> None:
    data = np.random.default_rng(0).bytes(700 * row_bytes)
    whole = row_digests(memoryview(data), row_bytes)
    for rows in (1, 5, 33, 100, 640):
        shared = row_digests(memoryview(data[: rows * row_bytes]), row_bytes)
        lost = next((at for at in range(rows) if shared[at * 16 : at * 16 + 16] != whole[at * 16 : at * 16 + 16]), rows)
        assert rows - lost < max(16, min(rows / 4, 128))


def test_every_row_counts_and_so_does_its_place() -> None:
    """In whichever row of a group something changes: the digests of a prefix tell it apart."""
    rows = [bytes([value]) * 100 for value in range(22)]
    shorter = [row_digests(memoryview(b"".join(each)), 100) for each in (rows[:16], rows[:15], rows[::-1], rows[1:])]
    whole = row_digests(memoryview(b"".join(rows)), 100)
    assert len({whole, *shorter, row_digests(memoryview(rows[0] * 22), 100)}) == len(shorter) + 2
    assert whole[: 16 * 16] == shorter[0]  # a whole group in common
    for row in range(16):
        other = [*rows[:row], b"x" * 100, *rows[row + 1 :]]
        changed = row_digests(memoryview(b"".join(other)), 100)
        assert all(changed[at : at + 16] != whole[at : at + 16] for at in range(0, 16 * 16, 16))
        assert changed[16 * 16 :] == whole[16 * 16 :]
