"""`split_k_linear` and `gated_linear` against torch's linear layer in fp32; then what reads partial sums, against the
same with the sum taken first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from runner.kernels import split_k, split_k_triton
from runner.kernels.activation import Activation
from runner.kernels.rms_norm import add_rms_norm_reference, rms_norm_reference
from runner.kernels.rms_norm_triton import add_rms_norm_triton, rms_norm_triton
from runner.kernels.rope import RopeTable, rope_and_write_reference
from runner.kernels.rope_triton import rope_and_write_triton
from runner.kernels.split_k import gated_linear_reference
from runner.kernels.split_k_triton import gated_linear_triton, split_k_linear_triton
from tests.runner.kernels import test_rope

each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


@dataclass(frozen=True)
class Case:
    rows: int
    inputs: int
    outputs: int
    parts: int
    bias: bool = False


CASES = [
    Case(3, 64, 8, 1),
    Case(16, 576, 33, 2, bias=True),
    Case(17, 1024, 70, 4),
    Case(64, 2048, 128, 8, bias=True),
    Case(33, 1216, 100, 4),  # 19 tiles: the last part has four, the others five
    Case(5, 2112, 40, 7),  # 33 tiles: seven parts of five at most, an eighth would be empty
]


def make_args(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
    torch.manual_seed(case.inputs)
    weight = torch.randn(case.outputs, case.inputs) * case.inputs**-0.5
    bias = torch.randn(case.outputs).to(dtype) if case.bias else None
    return torch.randn(case.rows, case.inputs).to(dtype), weight.to(dtype), bias


def put(args: tuple[Any, ...], device: torch.device) -> Any:
    return [arg.to(device) if isinstance(arg, Tensor) else arg for arg in args]


@each_dtype
@pytest.mark.parametrize("case", CASES, ids=str)
def test_parts_add_up(case: Case, dtype: torch.dtype, triton_device: torch.device) -> None:
    args = make_args(case, dtype)
    out = split_k_linear_triton(*put(args, triton_device))
    x, weight, bias = args
    expected = linear(x.float(), weight.float(), None if bias is None else bias.float())
    if case.parts == 1:
        assert out.shape == expected.shape and out.dtype == dtype
        torch.testing.assert_close(out.cpu().float(), expected, rtol=1e-2, atol=1e-2)
    else:
        assert out.shape == (case.parts, case.rows, case.outputs) and out.dtype == torch.float32
        torch.testing.assert_close(out.cpu().sum(0), expected, rtol=1e-4, atol=1e-4)


def test_wide_tiles(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large layers have tiles of their own."""
    monkeypatch.setattr(split_k_triton, "_LARGE", 0)
    test_parts_add_up(Case(33, 1216, 100, 4), torch.bfloat16, triton_device)
    for programs in (2, 1):
        monkeypatch.setattr(split_k_triton, "_PROGRAMS", programs)
        test_gated(Case(20, 576, 200, 1, bias=True), "silu", torch.bfloat16, triton_device)


@each_dtype
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("case", [Case(3, 128, 34, 1), Case(20, 576, 200, 1, bias=True)], ids=str)
def test_gated(case: Case, activation: Activation, dtype: torch.dtype, triton_device: torch.device) -> None:
    x, weight, bias = make_args(case, dtype)
    there = put((x, weight, bias), triton_device)
    out = gated_linear_triton(there[0], there[1], there[2], activation)
    expected = gated_linear_reference(x.float(), weight.float(), None if bias is None else bias.float(), activation)
    assert out.shape == (case.rows, case.outputs // 2) and out.dtype == dtype
    torch.testing.assert_close(out.cpu().float(), expected, rtol=2e-2, atol=3e-2)


def split(x: Tensor, parts: int) -> Tensor:
    """Partial sums in fp32 whose sum, rounded, is about x."""
    pieces = torch.randn(parts, *x.shape)
    return pieces + ((x.float() - pieces.sum(0)) / parts)


@each_dtype
@pytest.mark.parametrize("unit_offset", [False, True], ids=["llama", "gemma"])
@pytest.mark.parametrize("parts", [1, 3])
def test_norm_of_partial_sums(parts: int, unit_offset: bool, dtype: torch.dtype, triton_device: torch.device) -> None:
    torch.manual_seed(parts)
    pieces, residual, weight = split(torch.randn(5, 576), parts), torch.randn(5, 576).to(dtype), torch.randn(576)
    rows, weight = pieces.sum(0).to(dtype), weight.to(dtype)
    there = put((pieces, residual, weight), triton_device)
    normed, total = add_rms_norm_triton(there[0], there[1], there[2], 1e-3, unit_offset)
    expected, expected_total = add_rms_norm_reference(rows, residual, weight, 1e-3, unit_offset)
    assert normed.dtype == total.dtype == dtype
    # The order of the sum may move a value to the neighbouring one.
    torch.testing.assert_close(total.cpu(), expected_total, rtol=2**-7, atol=2**-8)
    torch.testing.assert_close(normed.cpu(), expected, rtol=2**-6, atol=2**-6)
    alone = rms_norm_triton(there[0], there[2], 1e-3, unit_offset)
    expected = rms_norm_reference(rows, weight, 1e-3, unit_offset)
    torch.testing.assert_close(alone.cpu(), expected, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("case", test_rope.CASES[:3] + test_rope.CASES[7:9], ids=str)
def test_rope_of_partial_sums(case: test_rope.Case, triton_device: torch.device) -> None:
    dtype = torch.bfloat16
    (q, k, v, cos, sin, positions, key_cache, value_cache, index), norm = test_rope.make_args(case, dtype)
    sizes = [case.heads, case.kv_heads, case.kv_heads]
    pieces = split(torch.cat([q, k, v], dim=1), 3)
    q, k, v = torch.split(pieces.sum(0).to(dtype), sizes, dim=1)
    there = put((cos, sin, positions, key_cache.clone(), value_cache.clone(), index), triton_device)
    there_cos, there_sin, there_positions, keys, values, there_index = there
    table, there_norm = RopeTable(there_cos, there_sin), None
    if norm is not None:
        weights = put((norm.query_weight, norm.key_weight), triton_device)
        there_norm = replace(norm, query_weight=weights[0], key_weight=weights[1])
    q_parts, k_parts, v_parts = torch.split(pieces.to(triton_device), sizes, dim=2)
    out = rope_and_write_triton(
        q_parts, k_parts, v_parts, table, there_positions, keys, values, there_index, there_norm
    )
    expected = rope_and_write_reference(q, k, v, RopeTable(cos, sin), positions, key_cache, value_cache, index, norm)
    assert out.dtype == dtype
    torch.testing.assert_close(out.cpu(), expected, rtol=2**-6, atol=6e-2)
    torch.testing.assert_close(keys.cpu(), key_cache, rtol=2**-6, atol=6e-2)
    torch.testing.assert_close(values.cpu(), value_cache, rtol=2**-7, atol=2**-8)


@pytest.mark.parametrize("room", [True, False])
def test_wide_tiles_are_for_gpus_with_room_for_them(room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (split_k, split_k_triton):
        monkeypatch.setattr(module, "has_room", lambda device: room)
    rows: Any = MagicMock(is_cuda=True, dtype=torch.bfloat16)
    rows.__len__.return_value = 8
    for inputs, outputs, fits in ((1024, 6144, True), (4096, 28672, room)):
        layer = nn.Linear(inputs, outputs, bias=False, device="meta")
        assert split_k.takes(rows, layer) == fits
    assert [split_k_triton._gated_block_n(n, rows) for n in (3072, 8192, 14336)] == (
        [32, 64, 128] if room else [32] * 3
    )
