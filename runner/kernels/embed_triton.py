"""The Triton side of `runner.kernels.embed`: one gather that reads a table row or an embedding row, never both."""

from __future__ import annotations

from torch import Tensor

from runner.kernels._triton import tl, triton

_MAX_BLOCK = 2048


@triton.jit
def _gather_kernel(  # type: ignore[no-untyped-def]
    token_ids, is_token_ids, rows, rows_stride, table, table_stride, out, out_stride,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    # A program has one row, so this branch is uniform; the bytes of one source are moved, as in a plain lookup.
    if tl.load(is_token_ids + row) != 0:
        source = table + tl.load(token_ids + row).to(tl.int64) * table_stride
        values = tl.load(source + columns, mask=inside, other=0.0)
    else:
        values = tl.load(rows + row * rows_stride + columns, mask=inside, other=0.0)
    tl.store(out + row * out_stride + columns, values, mask=inside)


def gather_rows_triton(token_ids: Tensor, is_token_ids: Tensor, rows: Tensor, table: Tensor, out: Tensor) -> None:
    num_rows, hidden = out.shape
    if num_rows == 0:
        return
    block = min(triton.next_power_of_2(hidden), _MAX_BLOCK)
    _gather_kernel[(num_rows, triton.cdiv(hidden, block))](
        token_ids, is_token_ids, rows, rows.stride(0), table, table.stride(0), out, out.stride(0),
        HIDDEN=hidden, BLOCK=block, num_warps=4 if block >= 512 else 1,
    )  # fmt: skip
