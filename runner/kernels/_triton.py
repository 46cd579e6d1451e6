"""Triton, or a stand-in that lets the kernel files be imported where it isn't installed (a CPU-only machine)."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
    INTERPRETED = bool(triton.knobs.runtime.interpret)
    """Kernels run in Triton's interpreter, on the CPU, which knows no assembly."""
except ImportError:
    HAS_TRITON = INTERPRETED = False

    class _Missing:
        """Accepts `@triton.jit`, `tl.constexpr` and so on at import; nothing made from it can be launched."""

        def __getattr__(self, name: str) -> Any:
            return _Missing()

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return args[0] if args and callable(args[0]) else _Missing()

    triton = tl = _Missing()


def dependent_launch(tensor: Tensor) -> dict[str, bool]:
    """Launch options of a kernel that starts while the one before it in the stream still runs (PDL, programmatic
    dependent launch, compute capability 9.0 and up). Such a kernel takes `PDL: tl.constexpr`, calls `gdc_wait` before
    it touches memory that the kernel before it writes or reads, in every program and on every path, and only then
    `gdc_launch_dependents`. So when it starts, whatever came before its predecessor is done, and may be read at once.
    """
    if tensor.is_cuda and _capability(tensor.device) >= (9, 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


__all__ = ["HAS_TRITON", "INTERPRETED", "dependent_launch", "tl", "triton"]
