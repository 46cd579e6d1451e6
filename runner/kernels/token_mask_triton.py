"""The Triton side of `runner.kernels.token_mask`."""

from __future__ import annotations

from torch import Tensor

from runner.kernels._triton import tl, triton

_BLOCK = 2048


# How long a mask is and where the entries lie behind the masks must not compile a kernel anew.
@triton.jit(do_not_specialize=["masks_stride"], do_not_specialize_on_alignment=["entries"])
def _mask_logits_kernel(  # type: ignore[no-untyped-def]
    logits, logits_stride, entries, masks, masks_stride, vocab, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    entry = tl.load(entries + row).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    word = tl.load(masks + row * masks_stride + token // 32, mask=inside, other=-1)
    forbidden = ((word >> (token % 32)) & 1) == 0
    # Only what is forbidden is written: most of a free-text mask is not.
    tl.store(logits + entry * logits_stride + token, float("-inf"), mask=inside & forbidden)


def mask_logits_triton(logits: Tensor, entries: Tensor, masks: Tensor) -> None:
    vocab = logits.shape[1]
    if len(entries):
        _mask_logits_kernel[(len(entries), triton.cdiv(vocab, _BLOCK))](
            logits, logits.stride(0), entries, masks, masks.stride(0), vocab, BLOCK=_BLOCK
        )
