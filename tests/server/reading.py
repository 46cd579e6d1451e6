"""The events of one engine request, read as the routes read them: told of news, then taken."""

from __future__ import annotations

import asyncio

from server.generation import ChoiceEvent, GenerationStream


async def next_event(stream: GenerationStream) -> ChoiceEvent | None:
    """None: nothing more comes. Raises APIError."""
    news = asyncio.Event()
    stream.listen(news.set)
    try:
        while (event := stream.take()) is None and not stream.has_ended:
            await news.wait()
            news.clear()
        return event
    finally:
        stream.listen(None)


async def next_tokens(stream: GenerationStream) -> list[int]:
    event = await next_event(stream)
    assert event is not None
    return event.tokens


async def all_events(stream: GenerationStream) -> list[ChoiceEvent]:
    """Until nothing more comes. Raises APIError."""
    events: list[ChoiceEvent] = []
    while (event := await next_event(stream)) is not None:
        events.append(event)
    return events
