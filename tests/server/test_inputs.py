"""What becomes of a completion's prompts, as far as no route is needed to see it."""

from __future__ import annotations

import asyncio

import pytest

from server.errors import ContextLengthExceeded
from server.inputs import completion_prompts
from server.schemas import CompletionRequest, parse
from tests.server.fakes import FakeEngine, loop_turns, say, services


def test_the_loop_has_its_turn_between_many_lists_of_ids() -> None:
    async def main() -> tuple[int, int]:
        async with loop_turns() as turns:
            request = parse(CompletionRequest, {"prompt": [[5] * 100] * 256})
            made = await completion_prompts(request, services(FakeEngine(say("x"))))
            return len(made), turns()

    made, turns = asyncio.run(main())
    assert made == 256 and turns >= 32


def test_ids_that_are_too_many_are_not_looked_at() -> None:
    """They may be millions."""
    request = parse(CompletionRequest, {"prompt": [[5], [2**40] * 1000]})
    with pytest.raises(ContextLengthExceeded):
        asyncio.run(completion_prompts(request, services(FakeEngine(say("x")))))
