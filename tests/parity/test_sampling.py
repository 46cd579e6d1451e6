"""Random answers: drawn from the model's distribution, filtered as asked; and the same again for the same seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.models import hf_logits
from tests.parity.chi_square import p_value
from tests.parity.harness import Harness, Prompt
from tests.parity.reference import sample
from tests.parity.shelf import EngineShelf


def test_p_value_tells_right_from_wrong() -> None:
    right = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0])
    draws = torch.multinomial(right, 2000, replacement=True, generator=torch.Generator().manual_seed(1))
    assert p_value(draws, right) > 0.01
    assert p_value(draws, torch.tensor([0.3, 0.4, 0.2, 0.1, 0.0])) < 1e-6
    assert p_value(torch.cat([draws, torch.tensor([4])]), right) == 0
    # The definition's own example: a die, 60 throws, (5, 8, 9, 8, 10, 20): chi-square 13.4, p 0.02.
    die = torch.repeat_interleave(torch.arange(6), torch.tensor([5, 8, 9, 8, 10, 20]))
    assert p_value(die, torch.full((6,), 1 / 6)) == pytest.approx(0.0199, abs=1e-4)


# --- the distribution -----------------------------------------------------------------------------------------------


def first_tokens(harness: Harness, prompt: Prompt, asks: dict[str, Any], seeds: int, siblings: int) -> Tensor:
    numbers = [harness.add(prompt, 1, n=siblings, seed=seed, **asks) for seed in range(seeds)]
    harness.run()
    return torch.tensor([harness.tokens(number, choice)[0] for number in numbers for choice in range(siblings)])


@pytest.mark.parametrize(
    ("asks", "processors"),
    [
        ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
        ({"temperature": 1.6}, [TemperatureLogitsWarper(1.6)]),
        ({"temperature": 0.7, "top_k": 12}, [TemperatureLogitsWarper(0.7), TopKLogitsWarper(12)]),
        ({"temperature": 0.7, "top_p": 0.6}, [TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.6)]),
        ({"temperature": 0.7, "min_p": 0.2}, [TemperatureLogitsWarper(0.7), MinPLogitsWarper(0.2)]),
        (
            {"temperature": 0.7, "min_p": 0.05, "top_k": 20, "top_p": 0.8},
            [TemperatureLogitsWarper(0.7), MinPLogitsWarper(0.05), TopKLogitsWarper(20), TopPLogitsWarper(0.8)],
        ),
        (
            {"temperature": 1.0, "repetition_penalty": 0.25},
            [RepetitionPenaltyLogitsProcessor(0.25), TemperatureLogitsWarper(1.0)],
        ),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_first_tokens_follow_the_distribution(shelf: EngineShelf, asks: dict[str, Any], processors: list[Any]) -> None:
    harness = shelf.engine("llama", max_num_seqs=64, max_num_batched_tokens=512, async_scheduling=True)
    s = sample(shelf.path("llama"), 24)
    logits = hf_logits(shelf.path("llama"), s.ids)[-1:]
    expected = LogitsProcessorList(processors)(torch.tensor([s.ids]), logits.clone()).softmax(-1)[0]
    draws = first_tokens(harness, s.ids, asks, seeds=31, siblings=64)
    assert p_value(draws, expected) > 0.001
    # And not from what it would be without the request's wishes.
    assert p_value(draws, logits.softmax(-1)[0]) < 1e-6


def test_embedding_rows_are_not_penalised(shelf: EngineShelf) -> None:
    """They have no ids: the distribution is the one without a penalty."""
    harness = shelf.engine("llama", max_num_seqs=64, max_num_batched_tokens=512, async_scheduling=True)
    s = sample(shelf.path("llama"), 24)
    expected = hf_logits(shelf.path("llama"), s.ids)[-1].softmax(-1)
    draws = first_tokens(harness, s.rows, {"temperature": 1.0, "repetition_penalty": 0.25}, seeds=31, siblings=64)
    assert p_value(draws, expected) > 0.001


# --- seeds ----------------------------------------------------------------------------------------------------------

ASKS: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "seed": 1234}


def test_a_seed_gives_the_same_tokens_anywhere(shelf: EngineShelf) -> None:
    """Alone or in a crowd, in any slot, chunked, preempted, overlapped or not, as ids or as embeddings."""
    path = shelf.path("llama")
    s = sample(path, 24)
    alone = shelf.engine("llama").generate(s.ids, **ASKS).tokens
    assert alone != s.tokens
    for settings in (
        {"async_scheduling": True, "max_num_batched_tokens": 8},
        {"async_scheduling": False, "max_num_batched_tokens": 12, "block_size": 4, "num_blocks": 33},
        {"async_scheduling": True, "max_num_batched_tokens": 12, "block_size": 4, "num_blocks": 33},
    ):
        harness = shelf.engine("llama", **settings)
        before = harness.engine.stats().preemptions
        prompts: list[Prompt] = [s.ids, s.rows, s.pieces(seed=1)]
        numbers = []
        for i, length in enumerate((17, 5, 31)):
            other = sample(path, length)
            harness.add(other.ids, 6, seed=i, temperature=1.5)  # Their slots are soon free, and those between stay.
            numbers.append(harness.add(prompts[i], **ASKS))
        harness.run()
        assert [harness.tokens(number) for number in numbers] == [alone] * 3
        if "num_blocks" in settings:
            assert harness.engine.stats().preemptions > before


def test_siblings_differ_and_repeat(shelf: EngineShelf) -> None:
    harness = shelf.engine("llama", async_scheduling=True)
    s = sample(shelf.path("llama"), 24)
    answers = []
    for n in (4, 4, 6):
        number = harness.add(s.ids, n=n, **ASKS)
        harness.run()
        answers.append([harness.tokens(number, choice) for choice in range(n)])
    assert len({tuple(tokens) for tokens in answers[2]}) == 6
    assert answers[0] == answers[1] == answers[2][:4]


@pytest.mark.parametrize("kind", ["neighbours", "bits", "extremes"])
def test_other_seeds_give_other_tokens(shelf: EngineShelf, kind: str) -> None:
    """Every one of a seed's 64 bits counts."""
    seeds = {
        "neighbours": list(range(-4, 4)),
        "bits": [1 << bit for bit in range(0, 63, 9)],
        "extremes": [-(2**63), 2**63 - 1, -(2**32), 2**32, 2**32 - 1, 0],
    }[kind]
    harness = shelf.engine("llama", async_scheduling=True)
    s = sample(shelf.path("llama"), 5)
    numbers = [harness.add(s.ids, 16, temperature=1.5, seed=seed) for seed in seeds]
    harness.run()
    assert len({tuple(harness.tokens(number)) for number in numbers}) == len(seeds)


def test_greedy_ignores_the_seed(shelf: EngineShelf) -> None:
    """Beside others that don't."""
    harness = shelf.engine("llama", async_scheduling=True)
    s = sample(shelf.path("llama"), 24)
    numbers = [harness.add(s.ids, seed=seed) for seed in (1, 2)]
    noisy = harness.add(s.ids, seed=1, temperature=1.2, top_k=5)
    harness.run()
    assert [harness.tokens(number) for number in numbers] == [s.tokens] * 2
    assert harness.tokens(noisy) != s.tokens
