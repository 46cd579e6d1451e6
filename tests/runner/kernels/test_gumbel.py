"""`gumbel_argmax`: its noise and its draws against the distributions, the kernel against the reference."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from runner.kernels.filters import NO_LAST, Floors, apply_floors
from runner.kernels.gumbel import gumbel_argmax, gumbel_argmax_reference, gumbel_noise
from runner.kernels.gumbel_triton import gumbel_argmax_triton
from runner.sampling_state import SamplingState
from tests.parity.chi_square import p_value

CPU = torch.device("cpu")
Arguments = tuple[Tensor, Tensor, SamplingState, Tensor, Floors | None]


def keys(num_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(low and high word of the seed, choice, position), [N] int32, all different from row to row."""
    generator = torch.Generator().manual_seed(num_rows)
    words = torch.randint(-(2**31), 2**31, (2, num_rows), generator=generator, dtype=torch.int32)
    choice = torch.randint(0, 4, (num_rows,), generator=generator, dtype=torch.int32)
    position = torch.randint(0, 100_000, (num_rows,), generator=generator, dtype=torch.int32)
    return words[0], words[1], choice, position


def make_state(temperature: Tensor, num_slots: int = 0) -> tuple[Tensor, SamplingState, Tensor]:
    """(slot, sampling, length): row i's temperature and the keys of `keys` in a slot of its own, among others."""
    n = len(temperature)
    num_slots = max(num_slots, n)
    slot = torch.randperm(num_slots, generator=torch.Generator().manual_seed(n))[:n]
    sampling = SamplingState.allocate(num_slots, CPU)
    sampling.floats.uniform_()
    sampling.ints.random_(-100, 100)
    length = torch.randint(0, 1000, (num_slots,), dtype=torch.int32)
    low, high, choice, position = keys(n)
    sampling.floats[0, slot] = temperature
    sampling.ints[1:, slot] = torch.stack([choice, low, high])
    length[slot] = position
    return slot.int(), sampling, length


def on(device: torch.device, logits: Tensor, slot: Tensor, sampling: SamplingState, length: Tensor,
       floors: Floors | None = None) -> Arguments:  # fmt: skip
    """The arguments of a choice, on a device."""
    state = SamplingState(sampling.floats.to(device), sampling.ints.to(device))
    if floors is not None:
        floors = Floors(floors.value.to(device), floors.last.to(device))
    return logits.to(device), slot.to(device), state, length.to(device), floors


def fmix32(x: int) -> int:
    """MurmurHash3's finaliser, as published, in Python's integers."""
    x ^= x >> 16
    x = x * 0x85EBCA6B % 2**32
    x ^= x >> 13
    x = x * 0xC2B2AE35 % 2**32
    return x ^ (x >> 16)


def test_noise_is_the_written_out_hash() -> None:
    low, high, choice, position = keys(20)
    noise = gumbel_noise(low, high, choice, position, 30)
    for row in range(20):
        words = [int(word[row]) % 2**32 for word in (low, high, choice, position)]
        first = second = 0x9E3779B9
        for word in words:
            first = fmix32(first ^ word)
        for word in reversed(words):
            second = fmix32(second ^ word)
        for token in range(30):
            x = (token * 0x9E3779B9 + first) % 2**32
            x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
            x = (x ^ (x >> 13) ^ second) * 0xC2B2AE35 % 2**32
            v = ((x ^ (x >> 16)) + 0.5) / 2**32
            expected = -math.log(-math.log1p(-v))
            assert math.isclose(float(noise[row, token]), expected, rel_tol=1e-5, abs_tol=1e-5)


def test_noise_is_gumbel_distributed_and_independent() -> None:
    noise = gumbel_noise(*keys(400), 1000).double()
    assert bool(noise.isfinite().all())
    # Kolmogorov-Smirnov against exp(-exp(-x)); 1.95 / sqrt(n) is the critical value at 0.1 %.
    uniform = torch.exp(-torch.exp(-noise)).flatten().sort().values
    n = uniform.numel()
    assert float((uniform - (torch.arange(n) + 0.5) / n).abs().max()) < 1.95 / math.sqrt(n)
    # Neither neighbouring tokens nor neighbouring rows are correlated.
    centred = noise - noise.mean()
    for lagged in (centred[:, 1:] * centred[:, :-1], centred[1:] * centred[:-1]):
        assert abs(float(lagged.mean() / centred.var())) < 5 / math.sqrt(lagged.numel())


def test_the_tail_is_as_fine_as_the_hash() -> None:
    """The largest noise comes from the smallest of 2^32 values, each as likely as the others."""
    noise = gumbel_noise(*keys(400), 50_000).flatten()
    n = noise.numel()
    for above in (8.0, 11.0, 14.0):
        expected = n * -math.expm1(-math.exp(-above))
        assert abs(int((noise > above).sum()) - expected) < 5 * math.sqrt(expected)
    # Among the largest there are next to no equals: one in 2^24 steps would give thousands of pairs.
    largest = noise[noise > 7.0]
    assert len(torch.unique(largest)) > 0.99 * len(largest)


@pytest.mark.parametrize("changed", range(4), ids=["seed_low", "seed_high", "choice", "position"])
def test_neighbouring_keys_give_unrelated_noise(changed: int) -> None:
    words = [torch.full((300,), 7, dtype=torch.int32) for _ in range(4)]
    words[changed] = torch.arange(300, dtype=torch.int32)
    low, high, choice, position = words
    noise = gumbel_noise(low, high, choice, position, 300).double()
    correlation = torch.corrcoef(noise)[~torch.eye(300, dtype=torch.bool)]
    assert float(correlation.abs().max()) < 6 / math.sqrt(300)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_draws_follow_the_softmax(temperature: float) -> None:
    torch.manual_seed(0)
    draws, vocab = 40_000, 12
    logits = torch.randn(vocab) * 2
    logits[3] = -torch.inf
    expected = torch.distributions.Categorical(logits=logits / temperature).probs * draws
    sampling = SamplingState.allocate(draws, CPU)
    sampling.floats[0] = temperature
    sampling.ints[2] = 1234
    slot = torch.arange(draws)
    sampled = gumbel_argmax(logits.expand(draws, vocab), slot, sampling, slot.int())
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
    assert gumbel_argmax(logits, *make_state(torch.tensor([0.0, 1.0])))[0] == 4
    assert gumbel_argmax(logits, *make_state(torch.zeros(2))).tolist() == [4, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_of_any_dtype_are_computed_with_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(50, 300) * 3).to(dtype)
    state = make_state(torch.rand(50))
    assert torch.equal(gumbel_argmax(logits, *state), gumbel_argmax(logits.float(), *state))


def test_the_tokens_go_into_the_buffer_given() -> None:
    logits = torch.randn(3, 20)
    state = make_state(torch.tensor([0.0, 1.0, 0.7]))
    out = torch.full((5,), -7)
    result = gumbel_argmax(logits, *state, None, out)
    assert out.tolist() == [*gumbel_argmax(logits, *state).tolist(), -7, -7]
    assert result.data_ptr() == out.data_ptr()


# --- the kernel -----------------------------------------------------------------------------------------------------


def assert_as_good(sampled: Tensor, logits: Tensor, slot: Tensor, sampling: SamplingState, length: Tensor,
                   floors: Floors | None = None) -> None:  # fmt: skip
    """The kernel's logarithm rounds differently: where its token is another, it is as good to the last bits."""
    expected = gumbel_argmax_reference(logits, slot, sampling, length, floors)
    index = slot.long()
    temperature = sampling.floats[0, index, None]
    scores = logits.float() if floors is None else apply_floors(logits, floors)
    _, choice, low, high = sampling.ints[:, index].unbind(0)
    noisy = scores / temperature.clamp(min=1e-9) + gumbel_noise(low, high, choice, length[index], logits.shape[1])
    scores = torch.where(temperature > 0, noisy, scores)
    rows = torch.arange(len(logits))
    torch.testing.assert_close(scores[rows, sampled], scores[rows, expected], rtol=2e-6, atol=4e-6)
    greedy = temperature[:, 0] == 0
    assert torch.equal(sampled[greedy], expected[greedy])
    assert float((sampled == expected).float().mean()) > 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize(("num_rows", "vocab"), [(1, 2), (2, 1000), (9, 1024), (40, 5003), (1, 5003)])
def test_gumbel_kernel(
    num_rows: int, vocab: int, filtered: bool, dtype: torch.dtype, triton_device: torch.device
) -> None:
    torch.manual_seed(vocab + num_rows)
    logits = torch.randn(num_rows, vocab) * 3
    logits[torch.rand(num_rows, vocab) < 0.1] = -torch.inf
    logits[:, 1] = 1.0
    logits = logits.to(dtype)
    state = make_state(torch.where(torch.rand(num_rows) < 0.3, 0.0, torch.rand(num_rows) * 2 + 0.1), num_rows + 5)
    floors = None
    if filtered:
        # Cut between equals, as low-precision logits often are; and not at all.
        value = logits.float().quantile(0.9, dim=-1, interpolation="nearest")
        value[::3] = -torch.inf
        last = torch.randint(0, vocab, (num_rows,), dtype=torch.int32)
        floors = Floors(value, torch.where(value == -torch.inf, NO_LAST, last).int())
    sampled = gumbel_argmax_triton(*on(triton_device, logits, *state, floors)).cpu()
    assert_as_good(sampled, logits, *state, floors)


def test_gumbel_kernel_cuts_between_equals(triton_device: torch.device) -> None:
    """Every token is as good as the others, and only those up to the last one may be drawn."""
    state = make_state(torch.ones(40))
    for last in (2, 1030):
        floors = Floors(torch.zeros(40), torch.full((40,), last, dtype=torch.int32))
        sampled = gumbel_argmax_triton(*on(triton_device, torch.zeros(40, 1100), *state, floors)).cpu()
        assert int(sampled.max()) <= last
        assert len(set(sampled.tolist())) > min(last, 20)
        assert_as_good(sampled, torch.zeros(40, 1100), *state, floors)


def test_gumbel_kernel_breaks_ties_like_the_reference(triton_device: torch.device) -> None:
    """Equal logits in one tile, in two tiles of one lane, and in two splits."""
    state = make_state(torch.zeros(3))
    for best in ([5, 6], [1030, 7], [7, 7 + 1024], [4000, 100], [4999]):
        logits = torch.zeros(3, 5000)
        logits[:, best] = 2.0
        assert gumbel_argmax_triton(*on(triton_device, logits, *state)).tolist() == [min(best)] * 3
    many = torch.zeros(700, 1500)  # one split a row
    many[:, [1499, 1100, 80 + 1024, 80]] = 1.0  # two of them in one lane
    sampled = gumbel_argmax_triton(*on(triton_device, many, *make_state(torch.zeros(700))))
    assert set(sampled.tolist()) == {80}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_gumbel_kernel_stays_inside_the_vocabulary(bad: float, temperature: float, triton_device: torch.device) -> None:
    vocab = 1500
    logits = torch.full((4, vocab), bad)
    logits[1, :1400] = 0.0
    logits[2, 3:] = 0.0
    sampled = gumbel_argmax_triton(*on(triton_device, logits, *make_state(torch.full((4,), temperature)))).cpu()
    assert bool(((sampled >= 0) & (sampled < vocab)).all())
    if bad != torch.inf:
        assert sampled[1] < 1400 and sampled[2] >= 3  # what isn't a number, or is ruled out, never wins


def test_the_coldest_temperature_is_greedy(triton_device: torch.device) -> None:
    torch.manual_seed(2)
    logits = torch.randn(4, 1100)
    logits[3] = -logits[3].abs()
    logits[3, 9] = 0.0  # must stay 0 when it is divided
    state = make_state(torch.full((4,), 1e-42))
    assert gumbel_argmax_triton(*on(triton_device, logits, *state)).tolist() == logits.argmax(-1).tolist()


def test_no_rows() -> None:
    assert gumbel_argmax(torch.zeros(0, 7), *make_state(torch.zeros(0), 3)).shape == (0,)


def test_padding_and_the_buffer_given(triton_device: torch.device) -> None:
    """Rows that pad a captured batch have slot 0 and whatever logits; the others are as without them."""
    torch.manual_seed(3)
    logits = torch.randn(8, 1500)
    logits[5:] = torch.nan
    slot, sampling, length = make_state(torch.full((8,), 0.9), 12)
    slot[5:] = 0
    alone = gumbel_argmax_triton(*on(triton_device, logits[:5], slot[:5], sampling, length)).cpu()
    out = torch.full((10,), -7, device=triton_device)
    result = gumbel_argmax_triton(*on(triton_device, logits, slot, sampling, length), out)
    assert result.data_ptr() == out.data_ptr()
    assert torch.equal(out[:5].cpu(), alone)
    assert out[8:].tolist() == [-7, -7]


def test_the_kernel_draws_what_it_drew_whatever_the_batch(triton_device: torch.device) -> None:
    """The noise depends on the key alone: not on the row's place, nor on how the vocabulary is split."""
    torch.manual_seed(1)
    logits, slot, sampling, length, _ = on(triton_device, torch.randn(30, 4100), *make_state(torch.ones(30)))
    together = gumbel_argmax_triton(logits, slot, sampling, length)
    alone = [gumbel_argmax_triton(logits[i : i + 1], slot[i : i + 1], sampling, length) for i in range(30)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_draws_follow_the_softmax(triton_device: torch.device) -> None:
    """With the hardware's logarithm."""
    torch.manual_seed(0)
    draws, vocab = 1_000_000, 12
    logits = torch.randn(vocab) * 2
    sampling = SamplingState.allocate(draws, CPU)
    sampling.floats[0] = 0.8
    slot = torch.arange(draws)
    sampled = gumbel_argmax_triton(*on(triton_device, logits.expand(draws, vocab), slot, sampling, slot.int())).cpu()
    assert p_value(sampled, (logits / 0.8).softmax(-1)) > 0.001
