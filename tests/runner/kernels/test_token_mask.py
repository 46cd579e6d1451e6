"""`mask_logits`: the reference against a loop over bits, the kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runner.kernels.token_mask import mask_logits, mask_logits_reference
from runner.kernels.token_mask_triton import mask_logits_triton

SHAPES = [
    # entries, vocabulary, words of a mask, rows masked
    (1, 32, 1, [0]),
    (4, 384, 12, [2, 0]),
    (3, 1000, 33, [0, 1, 2]),
    (5, 4099, 130, [4, 1]),
    (2, 64, 2, []),
]

shapes = pytest.mark.parametrize(("entries", "vocab", "words", "rows"), SHAPES)


def make(entries: int, vocab: int, words: int, rows: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(entries, vocab, generator=generator)
    masks = torch.randint(-(2**31), 2**31, (len(rows), words), generator=generator).int()
    return logits, torch.tensor(rows, dtype=torch.int32), masks


@shapes
def test_reference(entries: int, vocab: int, words: int, rows: list[int]) -> None:
    logits, index, masks = make(entries, vocab, words, rows)
    expected = logits.clone()
    for row, mask in zip(rows, masks.tolist(), strict=True):
        bits = [(mask[token // 32] >> (token % 32)) & 1 for token in range(vocab)]
        expected[row, torch.tensor(bits) == 0] = -torch.inf
    mask_logits(logits, index, masks)
    assert torch.equal(logits, expected)


@shapes
def test_kernel(entries: int, vocab: int, words: int, rows: list[int], triton_device: torch.device) -> None:
    logits, index, masks = make(entries, vocab, words, rows)
    out = logits.to(triton_device)
    mask_logits_triton(out, index.to(triton_device), masks.to(triton_device))
    mask_logits_reference(logits, index, masks)
    assert torch.equal(out.cpu(), logits)
