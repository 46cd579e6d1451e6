"""`logprobs_of`: the reference against log-softmax in doubles, the kernels against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runner.kernels.logprobs import Logprobs, logprobs_of
from runner.kernels.logprobs_triton import MAX_TOP, logprobs_of_triton

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
SHAPES = pytest.mark.parametrize(
    ("rows", "vocab", "top"), [(1, 2, 2), (3, 60, 0), (5, 60, 60), (4, 4096, 20), (3, 9001, 5), (2, 13_000, MAX_TOP)]
)


def make_case(rows: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(logits, tokens): logits with equals and ruled out ones, tokens from best to worst."""
    torch.manual_seed(vocab + rows)
    logits = torch.randn(rows, vocab) * 4
    logits[torch.rand(rows, vocab) < 0.05] = -torch.inf
    logits[:, 1] = 30.0  # far above the rest of its tile
    logits[-1] = (logits[-1] * 2).round() / 2
    tokens = torch.randint(0, vocab, (rows,))
    tokens[0] = 1
    return logits.to(dtype), tokens


def assert_log_softmax(result: Logprobs, logits: Tensor, tokens: Tensor, top: int) -> None:
    expected = logits.double().log_softmax(-1)
    chosen = expected.gather(1, tokens[:, None])
    torch.testing.assert_close(result.logprob.double(), chosen[:, 0], rtol=1e-6, atol=1e-5)
    assert result.logprob.dtype == result.top_logprobs.dtype == torch.float32
    assert torch.equal(result.rank, (logits > logits.gather(1, tokens[:, None])).sum(-1) + 1)
    # Stable: of equals the lowest ids come first.
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :top]
    assert torch.equal(result.top_tokens, order)
    torch.testing.assert_close(result.top_logprobs.double(), expected.gather(1, order), rtol=1e-6, atol=1e-5)


@DTYPES
@SHAPES
def test_logprobs_are_log_softmax(rows: int, vocab: int, top: int, dtype: torch.dtype) -> None:
    logits, tokens = make_case(rows, vocab, dtype)
    assert_log_softmax(logprobs_of(logits, tokens, top), logits, tokens, top)


@DTYPES
@SHAPES
def test_logprob_kernels(rows: int, vocab: int, top: int, dtype: torch.dtype, triton_device: torch.device) -> None:
    logits, tokens = make_case(rows, vocab, dtype)
    result = logprobs_of_triton(logits.to(triton_device), tokens.to(triton_device), top)
    result = Logprobs(*(getattr(result, name).cpu() for name in Logprobs.__dataclass_fields__))
    assert_log_softmax(result, logits, tokens, top)


def test_a_tile_without_any_token(triton_device: torch.device) -> None:
    """All of a tile ruled out, and fewer tokens left than asked for."""
    logits = torch.full((1, 9001), -torch.inf)
    logits[0, [5000, 8999]] = torch.tensor([1.0, 2.0])
    for device in (triton_device, torch.device("cpu")):
        result = logprobs_of(logits.to(device), torch.tensor([5000], device=device), 4)
        assert result.top_tokens.tolist() == [[8999, 5000, 0, 1]]
        assert result.rank.tolist() == [2]
        expected = torch.tensor([2.0, 1.0]).log_softmax(-1)
        torch.testing.assert_close(result.top_logprobs[0, :2].cpu(), expected)
        assert result.top_logprobs[0, 2:].tolist() == [-torch.inf] * 2
    if triton_device.type == "cpu":
        assert logprobs_of_triton(logits, torch.tensor([5000]), 4).top_tokens.tolist() == [[8999, 5000, 0, 1]]


def test_no_rows() -> None:
    result = logprobs_of(torch.zeros(0, 7), torch.zeros(0, dtype=torch.int64), 3)
    assert result.top_tokens.shape == result.top_logprobs.shape == (0, 3)


def test_more_than_the_kernels_can_find_is_refused(triton_device: torch.device) -> None:
    logits, tokens = torch.zeros(1, 10, device=triton_device), torch.zeros(1, dtype=torch.int64, device=triton_device)
    with pytest.raises(ValueError, match="11 best"):
        logprobs_of_triton(logits, tokens, 11)
