"""The Triton side of `runner.kernels.admit`: all of a step's admissions in one launch."""

from __future__ import annotations

from torch import Tensor

from runner.kernels._triton import tl, triton
from runner.kernels.admit import HEADER
from runner.slots import SlotState

_BLOCK = 1024


@triton.jit(do_not_specialize=["headers"])
def _admit_kernel(  # type: ignore[no-untyped-def]
    upload, headers, token_ids, token_ids_stride, block_table, block_table_stride, length, computed, prompt_len,
    floats, floats_stride, ints, ints_stride,
    HEADER: tl.constexpr, FLOATS: tl.constexpr, INTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (a, c): the c-th BLOCK ids and blocks of admission a; the first one also its header."""
    header = upload + headers + tl.program_id(0) * HEADER
    slot = tl.load(header).to(tl.int64)
    known = tl.load(header + 1)
    ids = upload + tl.load(header + 14)
    blocks = tl.load(header + 15)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(token_ids + slot * token_ids_stride + at, tl.load(ids + at, mask=at < known), mask=at < known)
    here = at < blocks
    tl.store(block_table + slot * block_table_stride + at, tl.load(ids + known + at, mask=here), mask=here)
    if tl.program_id(1) == 0:
        tl.store(length + slot, known)
        tl.store(computed + slot, tl.load(header + 2))
        tl.store(prompt_len + slot, tl.load(header + 3))
        for i in tl.static_range(FLOATS):
            tl.store(floats + i * floats_stride + slot, tl.load(header + 4 + i).to(tl.float32, bitcast=True))
        for i in tl.static_range(INTS):
            tl.store(ints + i * ints_stride + slot, tl.load(header + 4 + FLOATS + i))


def admit_triton(upload: Tensor, headers: int, count: int, longest: int, slots: SlotState, floats: Tensor,
                 ints: Tensor) -> None:  # fmt: skip
    _admit_kernel[(count, triton.cdiv(longest, _BLOCK))](
        upload, headers, slots.token_ids, slots.token_ids.stride(0), slots.block_table, slots.block_table.stride(0),
        slots.length, slots.computed, slots.prompt_len, floats, floats.stride(0), ints, ints.stride(0),
        HEADER=HEADER, FLOATS=floats.shape[0], INTS=ints.shape[0], BLOCK=_BLOCK,
    )  # fmt: skip
