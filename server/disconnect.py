"""Clients that go away. The framework does not cancel a plain handler, and a streamed response only on some servers; so
both run beside a task that reads the connection until it says so. Used by the routes (`respond`) and `event_stream`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

_Result = TypeVar("_Result")


class ClientGone(Exception):
    """The client has closed the connection; nobody reads the answer."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of `work`. When the client leaves first, `work` is cancelled and ClientGone is raised.

    The request's body must have been read: what `receive` has before the disconnect is thrown away.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done() and watching.exception() is None:
            raise ClientGone
        return await working
    finally:
        watching.cancel()
        # The work's own clean-up (it aborts its engine requests) is over before anybody goes on.
        if not working.done():
            working.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await working
        # An error's traceback has this frame: with the task that has the error it would be a cycle, and the collector
        # may be long in coming for the body that the work was about.
        del working


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
