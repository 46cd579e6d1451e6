"""`rms_norm` and `add_rms_norm`: the references against transformers' modules, the kernels against the references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from runner.kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from runner.kernels.rms_norm_triton import add_rms_norm_triton, rms_norm_triton

SHAPES = [(1, 64), (5, 576), (3, 4096), (2, 5376)]
EPS = 1e-3
each_shape = pytest.mark.parametrize("shape", SHAPES)
each_kind = pytest.mark.parametrize("unit_offset", [False, True], ids=["llama", "gemma"])
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def make_case(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(x, residual, weight); x is a slice of something wider."""
    torch.manual_seed(shape[1])
    x = (torch.randn(shape[0], shape[1] + 64) * 0.1).to(dtype)[:, : shape[1]]
    return x, torch.randn(shape).to(dtype), torch.randn(shape[1]).to(dtype)


def theirs(x: Tensor, weight: Tensor, unit_offset: bool) -> Tensor:
    module = (Gemma3RMSNorm if unit_offset else LlamaRMSNorm)(x.shape[1], eps=EPS)
    module.weight.data = weight
    out: Tensor = module(x).detach()
    return out


@each_shape
@each_kind
@each_dtype
def test_references_are_the_modules_of_transformers(
    shape: tuple[int, int], unit_offset: bool, dtype: torch.dtype
) -> None:
    x, residual, weight = make_case(shape, dtype)
    assert torch.equal(rms_norm_reference(x, weight, EPS, unit_offset), theirs(x, weight, unit_offset))
    normed, total = add_rms_norm_reference(x, residual, weight, EPS, unit_offset)
    assert torch.equal(total, residual + x)
    assert torch.equal(normed, theirs(total, weight, unit_offset))


@pytest.mark.parametrize("shape", [*SHAPES, (70, 576)])
@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_norms_of_the_cpu(shape: tuple[int, int], unit_offset: bool, dtype: torch.dtype, threads: int) -> None:
    x, residual, weight = make_case(shape, dtype)
    before = x.clone(), residual.clone()
    expected, expected_total = add_rms_norm_reference(x, residual, weight, EPS, unit_offset)
    normed, total = add_rms_norm(x, residual, weight, EPS, unit_offset)
    rtol, atol = {torch.float32: (1e-5, 1e-6), torch.float16: (2**-9, 1e-6)}.get(dtype, (2**-6, 1e-6))
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(normed, expected, rtol=rtol, atol=atol)
    alone = rms_norm(x, weight, EPS, unit_offset)
    torch.testing.assert_close(alone, rms_norm_reference(x, weight, EPS, unit_offset), rtol=rtol, atol=atol)
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@each_shape
@each_kind
@each_dtype
def test_norm_kernels(
    shape: tuple[int, int], unit_offset: bool, dtype: torch.dtype, triton_device: torch.device
) -> None:
    x, residual, weight = make_case(shape, dtype)
    there = [torch.empty_strided(t.shape, t.stride(), dtype=dtype, device=triton_device) for t in (x, residual)]
    for copy, source in zip(there, (x, residual), strict=True):
        copy.copy_(source)
    there_weight = weight.to(triton_device)
    expected, expected_total = add_rms_norm_reference(x, residual, weight, EPS, unit_offset)
    normed, total = add_rms_norm_triton(there[0], there[1], there_weight, EPS, unit_offset)
    rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else (2**-7, 1e-6)
    assert torch.equal(total.cpu(), expected_total)
    torch.testing.assert_close(normed.cpu(), expected, rtol=rtol, atol=atol)
    alone = rms_norm_triton(there[0], there_weight, EPS, unit_offset)
    torch.testing.assert_close(alone.cpu(), rms_norm_reference(x, weight, EPS, unit_offset), rtol=rtol, atol=atol)
    assert torch.equal(there[0].cpu(), x) and torch.equal(there[1].cpu(), residual)  # the inputs are left alone
