"""Large answers, handed to the connection piece by piece. Used by `request_log`, around everything.

The connection takes a piece when it has room. So an answer is not over before its client has read nearly all of it:
what was reserved for it (`answer_memory`) is counted for as long as it is held, however slowly it is read.
"""

from __future__ import annotations

from collections.abc import Iterator

from starlette.types import Message

PIECE_BYTES = 256 * 1024


def pieces_of(message: Message) -> Iterator[Message]:
    """A message `http.response.body` as one or several."""
    body = message.get("body", b"")
    if len(body) <= PIECE_BYTES:
        yield message
        return
    view, more = memoryview(body), message.get("more_body", False)
    for start in range(0, len(view), PIECE_BYTES):
        end = start + PIECE_BYTES
        yield {**message, "body": view[start:end], "more_body": more or end < len(view)}
