"""Work beside a connection: it ends when the client leaves, and its clean-up is over by then."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from typing import Any

import pytest

from server.disconnect import ClientGone, unless_gone


class Connection:
    def __init__(self, *, leaves_after: float | None = None, error: Exception | None = None) -> None:
        self.leaves_after = leaves_after
        self.error = error
        self.listeners = 0

    async def receive(self) -> dict[str, Any]:
        self.listeners += 1
        try:
            await asyncio.sleep(3600 if self.leaves_after is None else self.leaves_after)
            if self.error is not None:
                raise self.error
            return {"type": "http.disconnect"}
        finally:
            self.listeners -= 1


async def result(value: str) -> str:
    await asyncio.sleep(0.01)
    return value


def test_the_result() -> None:
    connection = Connection()
    assert asyncio.run(unless_gone(connection.receive, result("x"))) == "x"
    assert connection.listeners == 0


def test_an_error_is_the_works_own() -> None:
    async def fail() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        asyncio.run(unless_gone(Connection().receive, fail()))


def test_a_client_that_leaves() -> None:
    cleaned = []

    async def work() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.02)
            cleaned.append(True)

    with pytest.raises(ClientGone):
        asyncio.run(unless_gone(Connection(leaves_after=0.01).receive, work()))
    assert cleaned == [True]


def test_a_connection_that_cannot_be_read_does_not_end_the_work() -> None:
    connection = Connection(leaves_after=0, error=RuntimeError("broken"))
    assert asyncio.run(unless_gone(connection.receive, result("x"))) == "x"


def test_being_cancelled_cancels_the_work() -> None:
    cancelled = []

    async def work() -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def main() -> None:
        task = asyncio.create_task(unless_gone(Connection().receive, work()))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    asyncio.run(main())
    assert cancelled == [True]


def test_failed_work_leaves_nothing_to_the_collector() -> None:
    """The frames of its traceback have the body: they go with the error, not when the collector comes."""

    class Body:
        pass

    body = Body()
    held = weakref.ref(body)

    async def work(body: Body) -> None:
        await asyncio.sleep(0)
        raise ValueError

    async def ask(body: Body) -> None:
        with contextlib.suppress(ValueError):
            await unless_gone(Connection().receive, work(body))

    gc.collect()
    gc.disable()
    try:
        asyncio.run(ask(body))
        del body
        assert held() is None
    finally:
        gc.enable()
