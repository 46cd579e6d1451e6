"""bfloat16 linear layers on the CPU, their weights laid out for oneDNN once instead of in every call.

Applied by `runner.model` after loading. The product is the same; only where its operands lie changes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """`nn.Linear` for inference. The packed weight takes the place of the plain one, unless that is shared."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._bias = linear.bias
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features], bfloat16."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")
        return out


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
