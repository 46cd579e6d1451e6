"""Packed linear layers against torch's own."""

from __future__ import annotations

import pytest
import torch
from numba import njit
from numba.extending import intrinsic
from torch import nn

import runner.kernels.packed_linear_cpu as kernels
from runner.kernels import tile_cpu
from runner.kernels._numba import FAST, Kernel, helper
from runner.kernels.packed_linear_cpu import has_dot_product, is_known_layout, packed_linear_cpu
from runner.packed_linear import PackedLinear, can_pack, pack_linears

pytestmark = pytest.mark.skipif(not can_pack(), reason="this machine's oneDNN has no bfloat16")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 32])
@torch.inference_mode()
def test_the_product_is_the_same(rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    linear = nn.Linear(96, 80, bias=bias, dtype=torch.bfloat16)
    x = torch.randn(1, rows, 96, dtype=torch.bfloat16)
    exact = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double() if bias else None)
    packed = PackedLinear(linear)(x)
    assert packed.shape == exact.shape and packed.dtype == torch.bfloat16
    # One rounding to bfloat16 (8 bits) of a sum that is kept in float32.
    torch.testing.assert_close(packed.double(), exact, rtol=2**-7, atol=2**-7)


@torch.inference_mode()
def test_a_layout_that_is_not_known_is_left_to_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "is_known_layout", lambda *arguments: False)
    monkeypatch.setattr(kernels, "packed_linear_cpu", None)
    linear = nn.Linear(96, 80, dtype=torch.bfloat16)
    x = torch.randn(2, 96, dtype=torch.bfloat16)
    torch.testing.assert_close(PackedLinear(linear)(x), linear(x), rtol=2**-7, atol=2**-7)


ROWS = (1, 2, 5, 6, 7, 13, 49, 100)
"""A tile and less, two, a few, and so many that the weights to come are asked for otherwise."""


@pytest.mark.parametrize("fused", [True, False], ids=["dot products", "without"])
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_rows_are_multiplied_by_our_own_kernel(bias: bool, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if fused and not has_dot_product():
        pytest.skip("this machine has no dot product of bfloat16")
    torch.manual_seed(0)
    compile_anew(monkeypatch, fused)
    # Widths that don't fill the last block, inputs that don't, and inputs that are taken in parts; rows that lie apart.
    for inputs, outputs in ((96, 80), (50, 100), (64, 64), (576, 200), (320, 128)):
        linear = nn.Linear(inputs, outputs, bias=bias, dtype=torch.bfloat16)
        layer = PackedLinear(linear)
        assert layer._own_rows
        for number, rows in enumerate(ROWS):
            monkeypatch.setattr(torch, "get_num_threads", lambda count=1 + number % 3: count)
            wide = torch.randn(rows, inputs + 6, dtype=torch.bfloat16)
            out = torch.zeros(rows, outputs + 2, dtype=torch.bfloat16)
            packed_linear_cpu(wide[:, :inputs], layer.address, linear.bias, outputs, out[:, :outputs])
            exact = nn.functional.linear(wide[:, :inputs].double(), linear.weight.double(),
                                         linear.bias.double() if bias else None)  # fmt: skip
            torch.testing.assert_close(out[:, :outputs].double(), exact, rtol=2**-7, atol=2**-7)
            assert not out[:, outputs:].any()


def compile_anew(monkeypatch: pytest.MonkeyPatch, fused: bool) -> None:
    """All parts of the kernel: not what an earlier test, or the cache, has left."""
    monkeypatch.setattr(tile_cpu, "has_dot_product", lambda: fused)
    monkeypatch.setattr(kernels, "tile_product_ahead", intrinsic(tile_cpu.tile_product_ahead._defn))
    monkeypatch.setattr(kernels, "_multiply_unit", helper(kernels._multiply_unit.py_func))
    monkeypatch.setattr(kernels, "multiply_columns", helper(kernels.multiply_columns.py_func))
    own = njit(fastmath=FAST, error_model="numpy")(kernels._linear.py_func)
    monkeypatch.setattr(kernels, "PACKED_LINEAR", Kernel(own, "i" * 11))


def test_an_unknown_layout_is_left_to_onednn() -> None:
    weight = torch.randn(80, 96).bfloat16()
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    address, size = torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed)
    assert is_known_layout(weight, address, size)
    assert not is_known_layout(weight, address, size + 2)
    assert not is_known_layout(weight[:, :95], address, size)
    weight[79, 95] += 1  # in the last block
    assert not is_known_layout(weight, address, size)
    plain = torch.randn(64, 64).bfloat16()
    assert not is_known_layout(plain, plain.data_ptr(), plain.nbytes)


@torch.inference_mode()
def test_a_row_whose_values_lie_apart() -> None:
    linear = nn.Linear(96, 80, bias=False, dtype=torch.bfloat16)
    rows = torch.randn(96, 3, dtype=torch.bfloat16).t()
    torch.testing.assert_close(PackedLinear(linear)(rows), linear(rows), rtol=2**-6, atol=2**-7)


def test_only_plain_bfloat16_layers_are_replaced() -> None:
    class Special(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(8, 8, dtype=torch.bfloat16), nn.Linear(8, 8), Special(8, 8, dtype=torch.bfloat16))
    pack_linears(model)
    assert [type(layer) for layer in model] == [PackedLinear, nn.Linear, Special]
