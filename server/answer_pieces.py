"""Large answers, handed to the connection piece by piece. Used by `request_log`, around everything.

The connection takes a piece when it has room. So an answer is not over before its client has read nearly all of it:
what was reserved for it (`answer_memory`) is counted for as long as it is held, however slowly it is read.
What waits for room is told to who watches over that (`slow_readers`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from starlette.types import Message, Scope

PIECE_BYTES = 256 * 1024
ANSWER_REST = "intarsia.answer_rest"
"""The extension of ASGI by which the protocol (see `http_protocol`) asks to be told how many bytes of a message wait
behind the piece that is being sent. Called with them."""


def pieces_of(message: Message, scope: Scope) -> Iterator[Message]:
    """A message `http.response.body` as one or several, each to be sent before the next is asked for. `scope`: the
    request's."""
    body = message.get("body", b"")
    if len(body) <= PIECE_BYTES:
        yield message
        return
    view, more = memoryview(body), message.get("more_body", False)
    tell_rest: Callable[[int], None] = scope.get("extensions", {}).get(ANSWER_REST, _tell_nobody)
    for start in range(0, len(view), PIECE_BYTES):
        end = start + PIECE_BYTES
        tell_rest(max(0, len(view) - end))
        yield {**message, "body": view[start:end], "more_body": more or end < len(view)}


def _tell_nobody(_: int) -> None:
    """Where the application runs behind another protocol than ours."""
