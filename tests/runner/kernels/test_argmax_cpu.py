"""The greedy choice's kernel against torch's own `argmax`."""

from __future__ import annotations

import pytest
import torch

from runner.kernels.argmax_cpu import argmax_cpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 7, 512, 513, 49_152])
def test_the_highest_of_equals_the_first(size: int, dtype: torch.dtype, threads: int) -> None:
    generator = torch.Generator().manual_seed(size)
    # Few different values, so that most rows have their highest several times.
    logits = torch.randint(-9, 9, (11, size), generator=generator).to(dtype) / 4
    logits[1] = -logits[1].abs() - 1
    logits[2] = -torch.inf
    logits[3, size // 2 :] = torch.inf
    logits[4] = -0.0
    logits[4, size // 3] = 0.0  # as high as the others
    logits[5] = -1e-7 if dtype == torch.float16 else -1e-40  # denormal
    logits[6] = torch.randn(size, generator=generator)
    assert torch.equal(argmax_cpu(logits), logits.double().argmax(-1))


def test_rows_that_lie_apart() -> None:
    logits = torch.randn(5, 40).t()
    assert torch.equal(argmax_cpu(logits), logits.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_nan_is_above_all_whatever_its_sign(dtype: torch.dtype) -> None:
    """x86 computes them with a minus. They are what a mask has left: minus infinity is what it forbids."""
    logits = torch.full((5, 700), -torch.inf, dtype=dtype)
    logits[0, 600:] = torch.nan
    logits[1, 5:] = -torch.nan
    logits[2] = -torch.nan
    logits[3, 0], logits[3, 650], logits[3, 660] = torch.inf, -torch.nan, torch.nan
    logits[4, 3] = logits[4, 3] - logits[4, 3]
    assert argmax_cpu(logits).tolist() == logits.argmax(-1).tolist() == [600, 5, 0, 650, 3]
