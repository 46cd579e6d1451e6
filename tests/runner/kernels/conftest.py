"""Where the kernels run in tests: on a CUDA device, or on the CPU in Triton's interpreter.

The interpreter runs when TRITON_INTERPRET=1 is set and Triton is installed (Triton 3.6 needs a NumPy below 2.4 for it):

    TRITON_INTERPRET=1 python -m pytest tests/runner/kernels

Tests that ask for `triton_device` are skipped where neither is there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from runner.kernels._triton import HAS_TRITON

INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "triton_device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(600))  # the interpreter is slow, and so is the first compilation
            if INTERPRETED:
                # NumPy warns of what a GPU does silently (overflow to infinity), and of Triton's own use of it.
                item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning"))


@pytest.fixture(scope="session")
def triton_device() -> Iterator[torch.device]:
    if INTERPRETED:
        with pytest.MonkeyPatch.context() as patch:
            _teach_bf16(patch)
            yield torch.device("cpu")
    elif HAS_TRITON and torch.cuda.is_available():
        yield torch.device("cuda")
    else:
        pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1 and Triton")


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Of torch and of the CPU's kernels. Skips where there is no Numba: a GPU's machine need not have it."""
    pytest.importorskip("numba")
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def _teach_bf16(patch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bf16 as its bits. Its `dot` multiplies those, and its conversion from fp32 cuts bits off
    where a GPU rounds."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle_of = interpreter.InterpreterBuilder, interpreter.TensorHandle
    plain_dot, plain_cast = builder.create_dot, builder.cast_impl

    def widen(handle: Any) -> Any:
        if handle.dtype != tl.bfloat16:
            return handle
        return handle_of((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *args: Any) -> Any:
        return plain_dot(self, widen(a), widen(b), *args)

    def cast_impl(self: Any, source: Any, dtype: Any) -> Any:
        if source.dtype.scalar != tl.float32 or dtype.scalar != tl.bfloat16:
            return plain_cast(self, source, dtype)
        bits = torch.from_numpy(np.array(source.data)).bfloat16().view(torch.int16).numpy().view(np.uint16)
        return handle_of(bits, tl.bfloat16)

    patch.setattr(builder, "create_dot", create_dot)
    patch.setattr(builder, "cast_impl", cast_impl)
