"""Several engine requests as one: opened together or not at all, read as one stream, closed together."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runner.messages import SamplingParams
from server.batch import Batch, EngineRequest
from server.errors import APIError, QueueFull
from server.prompt import PromptRows
from tests.server.fakes import FakeEngine, Line, loop_turns


def requests(count: int, n: int = 1) -> list[EngineRequest]:
    sampling = SamplingParams(max_tokens=5)
    return [EngineRequest(PromptRows.from_token_ids([4 + each]), sampling, n, "") for each in range(count)]


def engine(**options: Any) -> FakeEngine:
    """Says its prompt's first id five times."""
    return FakeEngine(lambda ids, _choice: Line([ids[0]] * 5, "length"), **options)


async def collect(batch: Batch) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    news = asyncio.Event()
    batch.listen(news.set)
    while not batch.has_ended:
        await news.wait()
        news.clear()
        while (taken := batch.take()) is not None:
            found.setdefault(taken[0], []).extend(taken[1].tokens)
    batch.listen(None)
    return found


@pytest.mark.parametrize("count", [1, 2, 200])
def test_every_event_of_every_prompt(count: int) -> None:
    async def main() -> dict[int, list[int]]:
        return await collect(await Batch.open(engine(), requests(count)))

    assert asyncio.run(main()) == {index: [4 + index] * 5 for index in range(count)}


def test_if_one_is_refused_none_runs() -> None:
    fake = engine(refuse=[None, QueueFull("full"), None], hang=True)

    async def main() -> None:
        with pytest.raises(QueueFull):
            await Batch.open(fake, requests(3))

    asyncio.run(main())
    assert [each.aborted for each in fake.submitted] == [[-1], [-1]]


class Slow(FakeEngine):
    """Accepts its first request, and no other for an hour."""

    async def generate(self, *arguments: Any, **options: Any) -> Any:
        if self.submitted and not self._refuse:
            await asyncio.sleep(3600)
        return await super().generate(*arguments, **options)


def test_the_loop_has_its_turn_between_many() -> None:
    """A thousand prompts are a tenth of a second of sending."""
    seen = list[int]()

    async def main() -> None:
        async with loop_turns() as turns:

            class Watched(FakeEngine):
                async def generate(self, *arguments: Any, **options: Any) -> Any:
                    seen.append(turns())
                    return await super().generate(*arguments, **options)

            (await Batch.open(Watched(lambda ids, _choice: Line([4])), requests(200))).close()

    asyncio.run(main())
    assert max(map(seen.count, seen)) <= 32


def test_a_refusal_does_not_wait_for_the_others() -> None:
    fake = Slow(lambda ids, _choice: Line([4] * 5), refuse=[None, QueueFull("full")], hang=True)

    async def main() -> None:
        with pytest.raises(QueueFull):
            await asyncio.wait_for(Batch.open(fake, requests(3)), 30)

    asyncio.run(main())
    assert [each.aborted for each in fake.submitted] == [[-1]]


def test_being_cancelled_while_opening_aborts_what_is_open() -> None:
    fake = Slow(lambda ids, _choice: Line([4] * 5))

    async def main() -> None:
        task = asyncio.create_task(Batch.open(fake, requests(2)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    assert [each.aborted for each in fake.submitted] == [[-1]]


@pytest.mark.parametrize("count", [1, 3])
def test_an_engine_that_dies(count: int) -> None:
    async def main() -> None:
        with pytest.raises(APIError, match="The engine stopped"):
            await collect(await Batch.open(engine(fail_after=2), requests(count)))

    asyncio.run(main())


def test_news_from_before_the_reader_listened_are_not_lost() -> None:
    async def main() -> dict[int, list[int]]:
        batch = await Batch.open(engine(), requests(3))
        await asyncio.sleep(0.05)  # all that comes has come
        return await asyncio.wait_for(collect(batch), 30)

    assert asyncio.run(main()) == {index: [4 + index] * 5 for index in range(3)}


@pytest.mark.parametrize("count", [1, 3])
def test_closing_aborts_what_has_not_ended(count: int) -> None:
    fake = engine(hang=True)

    async def main() -> None:
        batch = await Batch.open(fake, requests(count))
        reader = asyncio.create_task(collect(batch))
        await asyncio.sleep(0.01)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        batch.close()
        await asyncio.sleep(0)
        assert batch.take() is None
        assert batch.has_ended

    asyncio.run(main())
    assert [each.aborted for each in fake.submitted] == [[-1]] * count
