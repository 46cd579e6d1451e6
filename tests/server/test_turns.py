"""Keys take turns, whoever of them has more who wait; and a turn is never lost."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from server.turns import Turns


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def in_order(turns: Turns, keys: str) -> list[str]:
    """Those of `keys` that are let in, one by one, while nobody leaves but them."""
    let_in: list[str] = []

    async def visit(name: str) -> None:
        async with turns.turn(name[0]):
            let_in.append(name)
            await asyncio.sleep(0)

    counts: Counter[str] = Counter()
    tasks = []
    for key in keys:
        counts[key] += 1
        tasks.append(asyncio.create_task(visit(f"{key}{counts[key]}")))
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    return let_in


async def busy(count: int) -> Turns:
    turns = Turns(count)
    for _ in range(count):
        await turns.enter("busy")
    return turns


def test_keys_take_turns() -> None:
    async def main() -> None:
        turns = await busy(1)
        waiting = asyncio.create_task(in_order(turns, "aaaabac"))
        await settle()
        turns.leave()
        assert await waiting == ["a1", "b1", "c1", "a2", "a3", "a4", "a5"]
        assert turns._free == 1
        assert not turns._waiting

    asyncio.run(main())


def test_as_many_at_once_as_there_are() -> None:
    async def main() -> None:
        turns, inside, most = Turns(3), 0, 0

        async def visit(key: int) -> None:
            nonlocal inside, most
            async with turns.turn(key):
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(0.001)
                inside -= 1

        await asyncio.gather(*(visit(number % 4) for number in range(30)))
        assert most == turns._free == 3

    asyncio.run(main())


def test_no_turn_is_lost_to_those_who_give_up() -> None:
    """Before their turn, and in the moment of it."""

    async def main() -> None:
        rng = random.Random(0)
        for _ in range(200):
            turns = await busy(2)
            tasks = [asyncio.create_task(turns.enter(rng.choice("ab"))) for _ in range(6)]
            await asyncio.sleep(0)
            held = 2
            for task in rng.sample(tasks, 4):
                if rng.random() < 0.5 and held:
                    turns.leave()
                    held -= 1
                task.cancel()
                if rng.random() < 0.5:
                    await asyncio.sleep(0)
            await settle()
            held += sum(task.done() and not task.cancelled() for task in tasks)
            assert turns._free + held == 2
            waiting = sum(map(len, turns._waiting.values()))
            assert waiting == sum(not task.done() for task in tasks)
            assert turns._free == 0 or not waiting
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())


def test_thousands_that_are_cancelled_at_once_cost_no_turn() -> None:
    """As when the client that sent them dies, just before somebody leaves."""

    async def main() -> None:
        turns = await busy(1)
        waiting = [asyncio.create_task(turns.enter("many")) for _ in range(3000)]
        await settle()
        for task in waiting:
            task.cancel()
        turns.leave()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert turns._free == 1
        assert not turns._waiting

    asyncio.run(main())
