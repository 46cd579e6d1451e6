"""`gumbel_argmax`: its noise and its draws against the distributions, the kernel against the reference."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from runner.kernels.gumbel import gumbel_argmax, gumbel_argmax_reference, gumbel_noise
from runner.kernels.gumbel_triton import gumbel_argmax_triton


def keys(num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """(seed, choice, position), all different from row to row."""
    generator = torch.Generator().manual_seed(num_rows)
    seed = torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator)
    choice = torch.randint(0, 4, (num_rows,), generator=generator, dtype=torch.int32)
    position = torch.randint(0, 100_000, (num_rows,), generator=generator)
    return seed, choice, position


def fmix32(x: int) -> int:
    """MurmurHash3's finaliser, as published, in Python's integers."""
    x ^= x >> 16
    x = x * 0x85EBCA6B % 2**32
    x ^= x >> 13
    x = x * 0xC2B2AE35 % 2**32
    return x ^ (x >> 16)


def test_noise_is_the_written_out_hash() -> None:
    seed, choice, position = keys(20)
    noise = gumbel_noise(seed, choice, position, 30)
    for row in range(20):
        key = fmix32((int(seed[row]) % 2**32) ^ 0x9E3779B9)
        key = fmix32(key ^ (int(seed[row]) >> 32) % 2**32)
        key = fmix32(key ^ int(choice[row]))
        key = fmix32(key ^ int(position[row]) % 2**32)
        for token in range(30):
            v = (fmix32(fmix32(token * 0x9E3779B9 % 2**32) ^ key) + 0.5) / 2**32
            expected = -math.log(-math.log1p(-v))
            assert math.isclose(float(noise[row, token]), expected, rel_tol=1e-5, abs_tol=1e-5)


def test_noise_is_gumbel_distributed_and_independent() -> None:
    seed, choice, position = keys(400)
    noise = gumbel_noise(seed, choice, position, 1000).double()
    assert bool(noise.isfinite().all())
    # Kolmogorov-Smirnov against exp(-exp(-x)); 1.95 / sqrt(n) is the critical value at 0.1 %.
    uniform = torch.exp(-torch.exp(-noise)).flatten().sort().values
    n = uniform.numel()
    assert float((uniform - (torch.arange(n) + 0.5) / n).abs().max()) < 1.95 / math.sqrt(n)
    # Neither neighbouring tokens nor neighbouring rows are correlated.
    centred = noise - noise.mean()
    for lagged in (centred[:, 1:] * centred[:, :-1], centred[1:] * centred[:-1]):
        assert abs(float(lagged.mean() / centred.var())) < 5 / math.sqrt(lagged.numel())


@pytest.mark.parametrize("changed", ["seed", "choice", "position"])
def test_neighbouring_keys_give_unrelated_noise(changed: str) -> None:
    count = torch.arange(300)
    fixed = torch.full((300,), 7)
    row = {"seed": fixed, "choice": fixed.int(), "position": fixed}
    row[changed] = count.to(row[changed].dtype)
    noise = gumbel_noise(row["seed"], row["choice"], row["position"], 300).double()
    correlation = torch.corrcoef(noise)[~torch.eye(300, dtype=torch.bool)]
    assert float(correlation.abs().max()) < 6 / math.sqrt(300)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_draws_follow_the_softmax(temperature: float) -> None:
    torch.manual_seed(0)
    draws, vocab = 40_000, 12
    logits = torch.randn(vocab) * 2
    logits[3] = -torch.inf
    expected = torch.distributions.Categorical(logits=logits / temperature).probs * draws
    sampled = gumbel_argmax(
        logits.expand(draws, vocab),
        torch.full((draws,), temperature),
        torch.full((draws,), 1234),
        torch.zeros(draws, dtype=torch.int32),
        torch.arange(draws),
    )
    counts = sampled.bincount(minlength=vocab)
    assert counts[3] == 0
    keep = expected > 5
    rare = ~keep
    chi_square = float(((counts - expected)[keep] ** 2 / expected[keep]).sum())
    # The 99.9 % quantile of chi-square with at most 11 degrees of freedom.
    assert chi_square < 31.3
    assert float(counts[rare].sum()) < 60


def test_greedy_rows_ignore_the_noise_and_take_the_lowest_of_equals() -> None:
    logits = torch.zeros(2, 9)
    logits[:, [4, 6]] = 1.0
    temperature = torch.tensor([0.0, 1.0])
    assert gumbel_argmax(logits, temperature, *keys(2))[0] == 4
    assert gumbel_argmax(logits, torch.zeros(2), *keys(2)).tolist() == [4, 4]


@pytest.mark.parametrize("num_rows", [1, 2, 9, 40])
@pytest.mark.parametrize("vocab", [2, 1000, 1024, 5003])
def test_gumbel_kernel(num_rows: int, vocab: int, triton_device: torch.device) -> None:
    torch.manual_seed(vocab + num_rows)
    logits = torch.randn(num_rows, vocab) * 3
    logits[torch.rand(num_rows, vocab) < 0.1] = -torch.inf
    temperature = torch.where(torch.rand(num_rows) < 0.3, 0.0, torch.rand(num_rows) * 2 + 0.1)
    case = (logits, temperature, *keys(num_rows))
    sampled = gumbel_argmax_triton(*(tensor.to(triton_device) for tensor in case)).cpu()
    expected = gumbel_argmax_reference(*case)
    if triton_device.type == "cpu":
        assert sampled.tolist() == expected.tolist()
        return
    # The GPU's logarithm rounds differently: another token must be as good to the last bits.
    random = (temperature > 0)[:, None]
    noise = gumbel_noise(*case[2:], vocab)
    score = torch.where(random, logits / torch.where(random, temperature[:, None], 1.0) + noise, logits)
    rows = torch.arange(num_rows)
    assert torch.allclose(score[rows, sampled], score[rows, expected], rtol=1e-6, atol=1e-6)
    assert torch.equal(sampled[~random[:, 0]], expected[~random[:, 0]])


def test_gumbel_kernel_breaks_ties_like_the_reference(triton_device: torch.device) -> None:
    """Equal logits in one tile, in two tiles of one lane, and in two splits."""
    for best in ([5, 6], [1030, 7], [7, 7 + 1024], [4000, 100], [4999]):
        logits = torch.zeros(3, 5000, device=triton_device)
        logits[:, best] = 2.0
        zeros = torch.zeros(3, device=triton_device)
        sampled = gumbel_argmax_triton(logits, zeros, zeros.long(), zeros.int(), zeros.long())
        assert sampled.tolist() == [min(best)] * 3
    many = torch.zeros(700, 1500, device=triton_device)  # one split a row
    many[:, [1499, 1100, 80 + 1024, 80]] = 1.0  # two of them in one lane
    zeros = torch.zeros(700, device=triton_device)
    assert set(gumbel_argmax_triton(many, zeros, zeros.long(), zeros.int(), zeros.long()).tolist()) == {80}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_gumbel_kernel_stays_inside_the_vocabulary(bad: float, temperature: float, triton_device: torch.device) -> None:
    vocab = 1500
    logits = torch.full((4, vocab), bad)
    logits[1, :1400] = 0.0
    logits[2, 3:] = 0.0
    case = (logits, torch.full((4,), temperature), *keys(4))
    sampled = gumbel_argmax_triton(*(tensor.to(triton_device) for tensor in case)).cpu()
    assert bool(((sampled >= 0) & (sampled < vocab)).all())
    if bad != torch.inf:
        assert sampled[1] < 1400 and sampled[2] >= 3  # what isn't a number, or is ruled out, never wins


def test_no_rows() -> None:
    empty = torch.zeros(0)
    assert gumbel_argmax(torch.zeros(0, 7), empty, empty.long(), empty.int(), empty.long()).shape == (0,)


def test_the_kernel_draws_what_it_drew_whatever_the_batch(triton_device: torch.device) -> None:
    """The noise depends on the key alone: not on the row's place, nor on how the vocabulary is split."""
    torch.manual_seed(1)
    logits = torch.randn(30, 4100).to(triton_device)
    case = [logits, torch.ones(30, device=triton_device), *(key.to(triton_device) for key in keys(30))]
    together = gumbel_argmax_triton(*case)
    alone = torch.cat([gumbel_argmax_triton(*(tensor[i : i + 1] for tensor in case)) for i in range(30)])
    assert torch.equal(together, alone)
