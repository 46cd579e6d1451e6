"""Banned and allowed tokens against transformers' own logits processors, in whole generations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.messages import SamplingParams
from runner.slots import SlotState
from runner.token_bans import BanEdit, TokenBans
from tests.models import PAD_ID, Family, hf_model
from tests.parity.harness import Harness
from tests.parity.reference import Sample, sample

TinyModel = Callable[[Family], Path]


@pytest.fixture(scope="module")
def path(tiny_model: TinyModel) -> Path:
    return tiny_model("llama")


@pytest.fixture
def prompt(path: Path) -> Sample:
    return sample(path, 20)


@torch.inference_mode()
def reference(path: Path, ids: list[int], **options: Any) -> list[int]:
    """`generate` with its own processors, greedily."""
    settings = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None, "pad_token_id": PAD_ID, **options}
    given = torch.tensor([ids])
    output = hf_model(path).generate(given, attention_mask=torch.ones_like(given), **settings)
    return [int(token) for token in output[0, len(ids) :]]


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
def test_bad_words(path: Path, prompt: Sample, overlap: bool) -> None:
    """Words of one, two and three tokens, each of which the model would have said."""
    said = prompt.tokens
    words = [said[2:3], said[4:6], said[8:11]]
    # Not at the border: the library's processor also counts the prompt's tokens, and these are no part of it.
    assert not set(prompt.ids[-2:]) & {token for word in words for token in word}
    expected = reference(path, prompt.ids, bad_words_ids=words)
    assert expected != said[:24]
    harness = Harness(path, async_scheduling=overlap)
    banned = harness.add(prompt.ids, 24, bad_words=tuple(map(tuple, words)))
    free = harness.add(prompt.rows, 24)
    harness.run()
    assert harness.tokens(banned) == expected
    assert harness.tokens(free) == said[:24]


def test_bad_words_survive_preemption(path: Path, prompt: Sample) -> None:
    word = tuple(prompt.tokens[10:12])
    expected = reference(path, prompt.ids, bad_words_ids=[list(word)])
    harness = Harness(path, block_size=4, num_blocks=33, async_scheduling=True)
    numbers = [harness.add(prompt.rows, 24, bad_words=(word,)) for _ in range(6)]
    harness.run()
    assert harness.engine.stats().preemptions > 0
    assert all(harness.tokens(number) == expected for number in numbers)


def test_only_allowed_tokens(path: Path, prompt: Sample) -> None:
    allowed = sorted({*prompt.tokens[1:12:2], 5, 6, 7})
    expected = reference(path, prompt.ids, prefix_allowed_tokens_fn=lambda _batch, _ids: allowed)
    harness = Harness(path)
    found = harness.generate(prompt.ids, 24, allowed_token_ids=tuple(allowed), logprobs=0)
    assert found.tokens == expected
    # Log-probabilities are the model's own, so what is not allowed has its share.
    assert all(entry is not None and entry.logprob < 0 for entry in found.logprobs)
    sampled = harness.generate(prompt.ids, 24, allowed_token_ids=tuple(allowed), temperature=2.0, top_p=0.9, seed=3)
    assert set(sampled.tokens) <= set(allowed)


def test_the_prompt_is_no_part_of_a_bad_word() -> None:
    bans = TokenBans.of(SamplingParams(1, bad_words=((5, 6), (7,))), lambda tensor: tensor)
    ids = torch.tensor([9, 5, 5, 9], dtype=torch.int32)

    def banned(length: int, prompt_len: int) -> list[int]:
        row = torch.zeros(10)
        bans.apply(row, ids, torch.tensor(length), torch.tensor(prompt_len))
        return row.isneginf().nonzero()[:, 0].tolist()

    assert banned(3, 3) == banned(1, 1) == [7]
    assert banned(3, 2) == [6, 7]


def test_something_is_always_left() -> None:
    bans = TokenBans.of(SamplingParams(1, allowed_token_ids=(2, 3), bad_words=((2,), (3,))), lambda tensor: tensor)
    row = torch.arange(5.0)
    bans.apply(row, torch.zeros(4, dtype=torch.int32), torch.tensor(2), torch.tensor(1))
    assert row.tolist() == [-torch.inf, -torch.inf, 2.0, 3.0, -torch.inf]


def test_a_ban_asks_the_device_for_nothing() -> None:
    """Meta tensors have no values: whatever would wait for one fails."""
    meta = torch.device("meta")
    params = SamplingParams(1, allowed_token_ids=(2, 3), bad_words=((2, 4), (3,)))
    edit = BanEdit(1, TokenBans.of(params, lambda tensor: tensor.to(meta)))
    slots = SlotState.allocate(4, 16, 4, meta)
    edit.apply(torch.zeros(2, 8, device=meta), torch.zeros(2, dtype=torch.int32, device=meta), slots)
