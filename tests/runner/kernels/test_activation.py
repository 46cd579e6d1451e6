"""`gated`: the reference against transformers' activations, the kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

from runner.kernels.activation import Activation, gated, gated_reference
from runner.kernels.activation_triton import gated_triton

KINDS: list[tuple[Activation, str]] = [("silu", "silu"), ("gelu_tanh", "gelu_pytorch_tanh")]
SHAPES = [(1, 64), (4, 1536), (3, 1000)]


@pytest.mark.parametrize(("activation", "name"), KINDS)
def test_reference_is_the_mlp_of_transformers(activation: Activation, name: str) -> None:
    torch.manual_seed(0)
    gate, up = torch.randn(2, 5, 96)
    assert torch.equal(gated_reference(torch.cat([gate, up], 1), activation), ACT2FN[name](gate) * up)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("activation", "name"), KINDS)
@pytest.mark.parametrize("shape", [*SHAPES, (9, 1537)])
def test_gated_on_the_cpu(
    shape: tuple[int, int], activation: Activation, name: str, dtype: torch.dtype, threads: int
) -> None:
    torch.manual_seed(shape[1])
    gate_up = (torch.randn(shape[0], 2 * shape[1]) * 3).to(dtype)
    gate_up[0, :4] = torch.tensor([1e4, -1e4, 0.0, -100.0])  # where exponentials overflow
    rtol, atol = {torch.float32: (1e-5, 2e-6), torch.float16: (2**-9, 1e-5)}.get(dtype, (2**-6, 1e-5))
    torch.testing.assert_close(gated(gate_up, activation), gated_reference(gate_up, activation), rtol=rtol, atol=atol)
    gate_up[0, 0] = torch.nan
    assert gated(gate_up, activation)[0, 0].isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("activation", "name"), KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_gated_kernel(
    shape: tuple[int, int], activation: Activation, name: str, dtype: torch.dtype, triton_device: torch.device
) -> None:
    torch.manual_seed(shape[1])
    gate_up = (torch.randn(shape[0], 2 * shape[1]) * 3).to(dtype)
    gate_up[0, :4] = torch.tensor([1e4, -1e4, 0.0, -100.0])  # where exponentials overflow
    out = gated_triton(gate_up.to(triton_device), activation).cpu()
    rtol, atol = (1e-5, 2e-6) if dtype == torch.float32 else (2**-7, 1e-5)
    torch.testing.assert_close(out, gated_reference(gate_up, activation), rtol=rtol, atol=atol)
