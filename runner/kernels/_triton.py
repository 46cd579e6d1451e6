"""Triton, or a stand-in that lets the kernel files be imported where it isn't installed (a CPU-only machine)."""

from __future__ import annotations

from typing import Any

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

    class _Missing:
        """Accepts `@triton.jit`, `tl.constexpr` and so on at import; nothing made from it can be launched."""

        def __getattr__(self, name: str) -> Any:
            return _Missing()

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return args[0] if args and callable(args[0]) else _Missing()

    triton = tl = _Missing()

__all__ = ["HAS_TRITON", "tl", "triton"]
