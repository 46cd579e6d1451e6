"""`few_rows_linear`: the kernel against the plain sequence of norm, linear layer and activation, in fp32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.kernels.few_rows import few_rows_linear_reference
from runner.kernels.few_rows_triton import few_rows_linear_triton


@dataclass(frozen=True)
class Case:
    rows: int
    inputs: int
    outputs: int
    residual: bool = False
    norm: str | None = None
    bias: bool = False
    activation: Any = None


CASES = [
    Case(1, 64, 8),
    Case(2, 96, 7, bias=True),
    Case(1, 576, 33, residual=True, norm="plain"),
    Case(2, 576, 40, residual=True, norm="gemma", activation="gelu_tanh"),
    Case(1, 1024, 24, norm="plain", bias=True),
    Case(2, 3072, 20, residual=True, norm="plain", activation="silu"),
    Case(1, 2500, 10, residual=True, norm="plain", bias=True, activation="silu"),
]


def make_args(case: Case, dtype: torch.dtype) -> tuple[Any, ...]:
    torch.manual_seed(case.inputs)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape) * scale).to(dtype)

    return (
        random(case.rows, case.inputs),
        random(case.outputs, case.inputs, scale=case.inputs**-0.5),
        random(case.outputs) if case.bias else None,
        random(case.rows, case.inputs) if case.residual else None,
        random(case.inputs) if case.norm else None,
        1e-3,
        case.norm == "gemma",
        case.activation,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel(case: Case, dtype: torch.dtype, triton_device: torch.device) -> None:
    args = make_args(case, dtype)
    wide: list[Any] = [arg.float() if isinstance(arg, Tensor) else arg for arg in args]
    if case.residual:
        # The sum is rounded before it is normed: it is handed on.
        wide[0], wide[3] = (args[0] + args[3]).float(), torch.zeros(case.rows, case.inputs)
    expected, _ = few_rows_linear_reference(*wide)
    there: list[Any] = [arg.to(triton_device) if isinstance(arg, Tensor) else arg for arg in args]
    out, total = few_rows_linear_triton(*there)
    torch.testing.assert_close(out.cpu().float(), expected, rtol=2e-2, atol=3e-2)
    assert torch.equal(total.cpu(), args[0] if args[3] is None else args[0] + args[3])
