"""`gather_rows`: the reference against a loop, the kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runner.kernels.embed import gather_rows, gather_rows_reference
from runner.kernels.embed_triton import gather_rows_triton


def make_case(num_rows: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(num_rows * hidden)
    is_token_ids = torch.rand(num_rows) < 0.6
    token_ids = torch.randint(0, 50, (num_rows,), dtype=torch.int32)
    table = torch.randn(50, hidden).to(dtype)
    rows = torch.randn(num_rows + 3, hidden).to(dtype)
    # What the other source holds must not matter.
    rows[:num_rows][is_token_ids] = torch.nan
    unused = torch.ones(50, dtype=torch.bool)
    unused[token_ids[is_token_ids].long()] = False
    table[unused] = torch.inf
    return token_ids, is_token_ids, rows, table


SHAPES = [(1, 8), (5, 64), (33, 576), (3, 2048), (2, 5376)]


@pytest.mark.parametrize(("num_rows", "hidden"), SHAPES)
def test_gather_is_a_loop_over_rows(num_rows: int, hidden: int) -> None:
    token_ids, is_token_ids, rows, table = make_case(num_rows, hidden, torch.float32)
    out = torch.empty(num_rows, hidden)
    gather_rows(token_ids, is_token_ids, rows, table, out)
    for i in range(num_rows):
        assert torch.equal(out[i], table[token_ids[i]] if is_token_ids[i] else rows[i])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "hidden"), SHAPES)
def test_gather_kernel(num_rows: int, hidden: int, dtype: torch.dtype, triton_device: torch.device) -> None:
    case = make_case(num_rows, hidden, dtype)
    expected = torch.empty(num_rows, hidden, dtype=dtype)
    gather_rows_reference(*case, expected)
    out = torch.full((num_rows, hidden), torch.nan, dtype=dtype, device=triton_device)
    token_ids, is_token_ids, rows, table = (tensor.to(triton_device) for tensor in case)
    gather_rows_triton(token_ids, is_token_ids, rows, table, out)
    assert torch.equal(out.cpu(), expected)


def test_gather_kernel_reads_at_most_the_row_of_its_kind(triton_device: torch.device) -> None:
    """All embeddings: the ids are clamped zeros and the table's row 0 must not leak in, nor NaN spread."""
    rows = torch.randn(4, 32, device=triton_device)
    table = torch.full((1, 32), torch.nan, device=triton_device)
    zeros = torch.zeros(4, dtype=torch.int32, device=triton_device)
    out = torch.empty_like(rows)
    gather_rows_triton(zeros, zeros.bool(), rows, table, out)
    assert torch.equal(out, rows)
