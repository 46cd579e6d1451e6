"""A server without a model that streams completions as fast as it is told to: what the load generator is measured
against, and tested with. Plain asyncio, so that it can send far more events than a client must be able to read.

    python -m tests.bench.stub_server --port 8123 --step-ms 8
    python -m tests.bench.stub_server --port 8123 --tokens-per-second 40000

All streams advance together, as an engine's steps do: one event a stream and step, in one write each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import dataclass

import uvloop

CHUNK = {
    "id": "cmpl-0123456789abcdef0123456789abcdef",
    "object": "text_completion",
    "created": 1760000000,
    "model": "stub",
    "system_fingerprint": "fp_0123456789",
    "choices": [{"index": 0, "text": " t12345", "logprobs": None, "finish_reason": None, "stop_reason": None}],
    "usage": None,
}
HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
MODELS = b'{"object":"list","data":[{"id":"stub","object":"model"}]}'


def chunk(payload: bytes) -> bytes:
    """One event in an HTTP chunk of its own."""
    event = b"data: " + payload + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(event), event)


EVENT = chunk(json.dumps(CHUNK, separators=(",", ":")).encode())
END = chunk(b"[DONE]") + b"0\r\n\r\n"


def usage_event(prompt_tokens: int, completion_tokens: int) -> bytes:
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return chunk(json.dumps({**CHUNK, "choices": [], "usage": usage}, separators=(",", ":")).encode())


@dataclass
class Stream:
    writer: asyncio.StreamWriter
    total: int
    prompt_tokens: int
    finished: asyncio.Event
    done: int = 0


class Stub:
    """`step_seconds`: from one event of a stream to its next; with `tokens_per_second` that follows from how many
    streams there are."""

    def __init__(self, step_seconds: float, tokens_per_second: float | None = None) -> None:
        self._step_seconds = step_seconds
        self._tokens_per_second = tokens_per_second
        self._streams: list[Stream] = []
        self.sent = 0

    async def serve(self, port: int) -> None:
        server = await asyncio.start_server(self._connection, "127.0.0.1", port)
        async with server:
            await self._step_forever()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self._answer(head, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if head.startswith(b"GET"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(MODELS), MODELS))
            return
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        prompt = body.get("prompt")
        stream = Stream(writer, body["max_tokens"], len(prompt) if isinstance(prompt, list) else 1, asyncio.Event())
        writer.write(HEAD)
        self._streams.append(stream)
        await stream.finished.wait()

    async def _step_forever(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            pause = self._step_seconds
            if self._tokens_per_second is not None:
                pause = len(self._streams) / self._tokens_per_second
            due = max(due + pause, loop.time() - 0.02)  # a late step is made up for, but no more
            await asyncio.sleep(max(0.0005 if not self._streams else 0.0, due - loop.time()))
            self._step()

    def _step(self) -> None:
        for stream in self._streams:
            stream.done += 1
            self.sent += 1
            if stream.done < stream.total:
                stream.writer.write(EVENT)
            else:
                stream.writer.write(EVENT + usage_event(stream.prompt_tokens, stream.total) + END)
                stream.finished.set()
        self._streams = [stream for stream in self._streams if not stream.finished.is_set()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--step-ms", type=float, default=0.0, help="between two events of a stream")
    parser.add_argument("--tokens-per-second", type=float, help="of all streams together")
    arguments = parser.parse_args()
    stub = Stub(arguments.step_ms / 1e3, arguments.tokens_per_second)
    uvloop.run(stub.serve(arguments.port))


if __name__ == "__main__":
    main()
