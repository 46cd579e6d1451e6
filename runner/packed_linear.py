"""bfloat16 linear layers on the CPU, their weights laid out for oneDNN once instead of in every call.

Applied by `runner.model` after loading. The product is the same; only where its operands lie changes. Where it is
faster it is computed by a kernel of our own, from the same packed weights.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

FEW_ROWS = 8
"""What our kernel is faster for on every machine, as measured."""


class PackedLinear(nn.Module):
    """`nn.Linear` for inference. The packed weight takes the place of the plain one, unless that is shared."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        from runner.kernels.packed_linear_cpu import is_fastest, is_known_layout

        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        weight = linear.weight.detach()
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
        self.address: int = torch.ops.mkldnn.data_ptr(self._packed)
        known = is_known_layout(weight, self.address, torch.ops.mkldnn._nbytes(self._packed))
        self.is_own = known and is_fastest()
        """Whether our kernel computes it, whatever the number of rows."""
        self._own_rows = sys.maxsize // self.in_features if self.is_own else FEW_ROWS if known else 0

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features], bfloat16."""
        if rows.numel() <= self._own_rows * self.in_features:
            from runner.kernels.packed_linear_cpu import packed_linear_cpu

            if rows.dim() == 2:
                return packed_linear_cpu(rows, self.address, self.bias, self.out_features)
            flat = rows.reshape(-1, self.in_features)
            out = packed_linear_cpu(flat, self.address, self.bias, self.out_features)
            return out.view(*rows.shape[:-1], self.out_features)
        result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return result

    def writes(self, out: Tensor) -> bool:
        """Whether `write` takes it."""
        return self.is_own and out.shape[1] == self.out_features and out.stride(1) == 1

    def write(self, rows: Tensor, out: Tensor) -> None:
        """[T, in_features] to out: [T, out_features], bfloat16."""
        from runner.kernels.packed_linear_cpu import packed_linear_cpu

        packed_linear_cpu(rows, self.address, self.bias, self.out_features, out)


def can_pack() -> bool:
    """Whether this machine's oneDNN multiplies bfloat16 itself."""
    return bool(torch._C._has_mkldnn) and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_linears(model: nn.Module) -> None:
    """Replaces every plain bfloat16 `nn.Linear` below `model`, in place."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and child.weight.dtype == torch.bfloat16:
                setattr(module, name, PackedLinear(child))
    for parameter in model.parameters():
        # What is left shares one mapping with the whole checkpoint: copied, so that the packed layers' originals go.
        parameter.data = parameter.data.clone()
