"""`best_of`: of the choices that were made for a prompt, those that are answered. Called by `respond`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from server.choices import TokenRecord


class Ranked(Protocol):
    tokens: list[TokenRecord]
    """Each with its log-probability."""


_Choice = TypeVar("_Choice", bound=Ranked)


def best_choices(choices: Sequence[_Choice], made: int, kept: int) -> list[_Choice]:
    """`choices`: `made` for each prompt. The `kept` best of each, best first: those with the highest log-probability
    per token, as OpenAI defines it. Among equals, as they were made."""
    if made == kept:
        return list(choices)
    best: list[_Choice] = []
    for start in range(0, len(choices), made):
        best += sorted(choices[start : start + made], key=_mean_logprob, reverse=True)[:kept]
    return best


def _mean_logprob(choice: Ranked) -> float:
    values = [record.logprobs.logprob for record in choice.tokens if record.logprobs is not None]
    return sum(values) / len(values) if values else 0.0
