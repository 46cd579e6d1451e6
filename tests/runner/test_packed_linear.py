"""Packed linear layers against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

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


def test_only_plain_bfloat16_layers_are_replaced() -> None:
    class Special(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(8, 8, dtype=torch.bfloat16), nn.Linear(8, 8), Special(8, 8, dtype=torch.bfloat16))
    pack_linears(model)
    assert [type(layer) for layer in model] == [PackedLinear, nn.Linear, Special]
