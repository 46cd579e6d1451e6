"""What the protocol offers to streamed answers, for applications that are called without a server."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.event_stream import BODY_WRITER


class CollectedBody:
    """`event_stream.BodyWriter` that keeps what is written until the response's last part is sent."""

    def __init__(self) -> None:
        self.on_writable: Callable[[], None] | None = None
        self.is_full = False
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data

    def flush(self) -> None:
        pass


def with_body_writer(app: ASGIApp) -> ASGIApp:
    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        body = CollectedBody()

        async def send_collected(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": body.data + message.get("body", b"")}
                body.data = b""
            await send(message)

        await app({**scope, "extensions": {BODY_WRITER: body}}, receive, send_collected)

    return call
