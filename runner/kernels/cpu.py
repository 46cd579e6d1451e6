"""All kernels of the CPU, compiled for a model's dtype while it is loaded, so that no request waits for it.

Called by `Engine.load`.
"""

from __future__ import annotations

import platform
from collections.abc import Callable

import torch

from runner.kernels.activation_cpu import GATED
from runner.kernels.argmax_cpu import ARGMAX
from runner.kernels.attention_cpu import ATTENTION
from runner.kernels.decoder_cpu import DECODER
from runner.kernels.packed_linear_cpu import PACKED_LINEAR, is_fastest
from runner.kernels.rms_norm_cpu import RMS_NORM
from runner.kernels.rope_cpu import ROPE
from runner.kernels.tile_cpu import has_feature


def can_compile(dtype: torch.dtype) -> bool:
    """Without an instruction that converts float16, LLVM calls a function that is not there, and ends the process."""
    return dtype != torch.float16 or platform.machine() != "x86_64" or has_feature("f16c")


def compile_kernels(dtype: torch.dtype, progress: Callable[[str], None] = lambda stage: None) -> None:
    """Some seconds the first time; then the compiled code is read from the disk (`kernel_cache`)."""
    kernels = [RMS_NORM, ROPE, GATED, ATTENTION, ARGMAX]
    if dtype == torch.bfloat16:
        kernels += [PACKED_LINEAR, DECODER] if is_fastest() else [PACKED_LINEAR]
    for done, kernel in enumerate(kernels, 1):
        progress(f"compiling kernels: {done} of {len(kernels)}")
        kernel.compile(dtype)
