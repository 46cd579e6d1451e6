"""What each running request asks of the sampler, on the device, by slot.

Written by `runner.device_step` when it admits a sequence; read by slot inside the sampler's kernels, so that a step
gathers nothing and uploads nothing for them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner.messages import SamplingParams

FLOAT_FIELDS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
INT_FIELDS = ("top_k", "choice", "seed_low", "seed_high")


@dataclass
class SamplingState:
    """Sampling parameters by slot, on the device. `floats` [6, S] float32 and `ints` [4, S] int32, both contiguous; a
    row a field (in the order of FLOAT_FIELDS and INT_FIELDS, which the kernels know)."""

    floats: Tensor
    ints: Tensor

    @staticmethod
    def allocate(num_slots: int, device: torch.device) -> SamplingState:
        return SamplingState(
            torch.zeros(len(FLOAT_FIELDS), num_slots, device=device),
            torch.zeros(len(INT_FIELDS), num_slots, dtype=torch.int32, device=device),
        )


def pack(params: SamplingParams, choice: int) -> NDArray[np.int32]:
    """[10] int32: one slot's row of `floats` (as bits) and of `ints`."""
    packed = np.empty(len(FLOAT_FIELDS) + len(INT_FIELDS), np.int32)
    packed[:6].view(np.float32)[:] = (params.temperature, params.top_p, params.min_p, params.presence_penalty,
                                      params.frequency_penalty, params.repetition_penalty)  # fmt: skip
    packed[6:8] = params.top_k, choice
    packed[8:].view(np.int64)[0] = params.seed  # little-endian: low word first
    return packed
