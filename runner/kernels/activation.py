"""The gated activation of an MLP whose gate and up projections are merged into one.

Called by `runner.decoder`. Results are those of transformers' MLPs, rounded at the same places.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn.functional import gelu, silu

Activation = Literal["silu", "gelu_tanh"]


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up.

    Args:
        gate_up: [T, 2 * intermediate]: the gate's columns, then the up projection's.

    Returns:
        [T, intermediate], of the same dtype.
    """
    if gate_up.is_cuda:
        from runner.kernels.activation_triton import gated_triton

        return gated_triton(gate_up, activation)
    from runner.kernels.activation_cpu import gated_cpu

    return gated_cpu(gate_up, activation)


def gated_reference(gate_up: Tensor, activation: Activation) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return (silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")) * up
