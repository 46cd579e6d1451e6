"""Writes what a step's upload says of newly admitted sequences into their slots.

Called by `runner.device_step` before `prepare`, in steps that admit. The upload is one int32 buffer; for each admission
it holds a header of `HEADER` words, and somewhere behind the headers the sequence's known ids, then its blocks:

    0 slot · 1 known rows · 2 computed rows · 3 prompt_len · 4-9 sampling floats (as bits) · 10-13 sampling ints
    14 where its ids begin in the upload · 15 number of blocks
"""

from __future__ import annotations

import torch
from torch import Tensor

from runner.slots import SlotState

HEADER = 16


def admit(upload: Tensor, headers: int, count: int, longest: int, slots: SlotState, floats: Tensor,
          ints: Tensor) -> None:  # fmt: skip
    """
    Args:
        upload: [W] int32, device. headers: where the first header is. count: of admissions.
        longest: no admission has more ids or blocks.
        floats, ints: [6, S] float32 and [4, S] int32: sampling parameters by slot, written.
    """
    if upload.is_cuda:
        from runner.kernels.admit_triton import admit_triton

        admit_triton(upload, headers, count, longest, slots, floats, ints)
    else:
        admit_reference(upload, headers, count, longest, slots, floats, ints)


def admit_reference(upload: Tensor, headers: int, count: int, longest: int, slots: SlotState, floats: Tensor,
                    ints: Tensor) -> None:  # fmt: skip
    for header in upload[headers : headers + count * HEADER].view(count, HEADER):
        slot, known, computed, prompt_len = header[:4].tolist()
        ids, blocks = header[14:].tolist()
        slots.length[slot], slots.computed[slot], slots.prompt_len[slot] = known, computed, prompt_len
        floats[:, slot] = header[4:10].view(torch.float32)
        ints[:, slot] = header[10:14]
        slots.token_ids[slot, :known] = upload[ids : ids + known]
        slots.block_table[slot, :blocks] = upload[ids + known : ids + known + blocks]
