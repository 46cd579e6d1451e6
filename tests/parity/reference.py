"""Prompts and what the model says to them: the parity oracle.

The oracle is Hugging Face's `generate` on the prompt as token ids: alone, synchronous, eager, without paged cache.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from tests.models import TIE, embed, hf_generate, hf_logits, random_prompt
from tests.parity.harness import Piece, Prompt


@dataclass(frozen=True)
class Sample:
    """A prompt and its greedy continuation."""

    path: Path
    ids: list[int]
    tokens: list[int]

    @property
    def rows(self) -> Tensor:
        """The prompt as embeddings: [n, hidden]."""
        return embed(self.path, self.ids)

    def pieces(self, seed: int) -> Prompt:
        """The prompt as runs of tokens and embeddings in turn, cut at random places; both kinds, if it has two rows."""
        generator = random.Random(seed)
        cuts = sorted(generator.sample(range(1, len(self.ids)), min(len(self.ids) - 1, generator.randint(1, 4))))
        embedded = generator.random() < 0.5
        pieces: list[Piece] = []
        for start, end in zip([0, *cuts], [*cuts, len(self.ids)], strict=True):
            pieces.append(embed(self.path, self.ids[start:end]) if embedded else self.ids[start:end])
            embedded = not embedded
        return tuple(pieces)

    def stop(self) -> tuple[int, list[int]]:
        """A token id that first comes up near the middle of the answer, and the answer up to it."""
        first = {token: place for place, token in reversed(list(enumerate(self.tokens)))}
        token = min(first, key=lambda token: abs(first[token] - len(self.tokens) // 2))
        return token, self.tokens[: first[token] + 1]


@functools.cache
def sample(path: Path, length: int, seed: int = 0, max_new_tokens: int = 32) -> Sample:
    """A seeded prompt whose continuation is varied, so that a mistake shows, and nowhere near a tie, so that rounding,
    which depends on the batch, can't decide a token."""
    for attempt in range(50):
        found = oracle(path, random_prompt(length, seed + 1000 * length + 1_000_003 * attempt), max_new_tokens)
        if found is not None and len(set(found.tokens)) >= max_new_tokens // 4:
            return found
    raise AssertionError("no usable prompt in fifty: the model's logits are degenerate")


def penalised(path: Path, ids: list[int], counted: list[int], penalty: float, max_new_tokens: int) -> list[int] | None:
    """The greedy answer under a repetition penalty that counts `counted` of the prompt, by transformers; None where a
    near tie decides."""
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    made: list[int] = []
    while len(made) < max_new_tokens:
        scores = processor(torch.tensor([counted + made]), hf_logits(path, ids + made)[-1:])[0]
        best = scores.topk(2).values
        if best[0] - best[1] < TIE:
            return None
        made.append(int(scores.argmax()))
    return made


def oracle(path: Path, ids: list[int], max_new_tokens: int = 32) -> Sample | None:
    """What the model says to this very prompt; None where a near tie makes that a matter of rounding."""
    tokens = hf_generate(path, ids, max_new_tokens)
    best = hf_logits(path, ids + tokens)[len(ids) - 1 : -1].topk(2).values
    return Sample(path, ids, tokens) if (best[:, 0] - best[:, 1]).min() > TIE else None
