"""Streamed answers on their way to the connection: order, slow clients, large deltas, ends."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.chat_format import ChatFormat
from server.choices import Delta
from server.completions import CompletionFormat
from server.errors import APIError, QueueFull
from server.event_stream import _PlainTokens, _Pump
from server.hidden_states import HiddenBlock
from server.respond import Envelope, _Chunks
from server.rows_out import RowsOut
from server.schemas import ChatRequest, CompletionRequest, StreamOptions, parse
from tests.models import BOS_ID, EOS_ID, Family
from tests.server.fakes import FakeEngine, Line, byte_ids, ids_of, services, tokenizer
from tests.server.harness import ServerProcess, Stream, completion, eventually
from tests.server.scripted_runner import Script


class Deltas:
    """`answer.Answer`, as far as the pump uses it: what is put in comes out. An exception is raised in its turn."""

    usage = None
    plain_choice = None

    def __init__(self) -> None:
        self.waiting: list[Sequence[Delta] | Exception] = []
        self.is_complete = False
        self._on_news: Callable[[], None] | None = None

    def listen(self, on_news: Callable[[], None] | None) -> None:
        self._on_news = on_news

    def take(self) -> Sequence[Delta] | None:
        if not self.waiting:
            return None
        item = self.waiting.pop(0)
        if isinstance(item, Exception):
            raise item
        self.is_complete = any(delta.finish_reason is not None for delta in item)
        return item

    def put(self, *items: Sequence[Delta] | Exception) -> None:
        self.waiting += items
        if self._on_news is not None:
            self._on_news()


class CollectedBody:
    """`event_stream.BodyWriter` that keeps what is written."""

    is_idle = True

    def __init__(self) -> None:
        self.on_writable: Callable[[], None] | None = None
        self.is_full = False
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data

    async def flush(self) -> None:
        pass


class Texts:
    """`event_stream.Events`: each delta is its text and a line end."""

    def frame(self, index: int) -> None:
        return None

    def encode(self, delta: Delta) -> bytes:
        return delta.text.encode() + b"\n"


def text(value: str, **fields: Any) -> list[Delta]:
    return [Delta(0, value, **fields)]


def pumped(work: Callable[[Deltas, CollectedBody], Any]) -> bytes:
    """What is written while `work` goes on and then until the answer is complete."""

    async def main() -> bytes:
        deltas, body = Deltas(), CollectedBody()
        pump = _Pump(deltas, Texts(), body)  # type: ignore[arg-type]
        task = asyncio.create_task(pump.finished())
        await asyncio.sleep(0)
        await work(deltas, body)
        await asyncio.wait_for(task, 10)
        return body.data

    return asyncio.run(main())


def test_each_is_written_when_it_comes() -> None:
    async def work(deltas: Deltas, body: CollectedBody) -> None:
        deltas.put(text("a"))
        assert body.data == b"a\n"
        deltas.put(text("b"), text("c"))
        assert body.data == b"a\nb\nc\n"
        deltas.put(text("", finish_reason="stop"))

    assert pumped(work) == b"a\nb\nc\n\n"


def test_nothing_is_taken_while_the_connection_is_full() -> None:
    async def work(deltas: Deltas, body: CollectedBody) -> None:
        body.is_full = True
        deltas.put(text("a"))
        deltas.put(text("b"))
        await asyncio.sleep(0.01)
        assert body.data == b""
        assert len(deltas.waiting) == 2
        body.is_full = False
        assert body.on_writable is not None
        body.on_writable()
        await asyncio.sleep(0)
        assert body.data == b"a\nb\n"
        deltas.put(text("c", finish_reason="stop"))

    assert pumped(work) == b"a\nb\nc\n"


def test_a_delta_with_many_records_is_encoded_in_a_thread_and_keeps_its_place() -> None:
    many: Any = [object()] * 600

    async def work(deltas: Deltas, body: CollectedBody) -> None:
        deltas.put(text("a"), text("b", tokens=many), text("c"))
        deltas.put(text("d"))
        assert body.data == b"a\n"
        deltas.put(text("e", finish_reason="stop", prompt=many))

    assert pumped(work) == b"a\nb\nc\nd\ne\n"


def test_many_hidden_states_are_encoded_in_a_thread() -> None:
    rows = RowsOut("hidden_states", [bytes(600 * 256)], 600, 128, "float16")

    async def work(deltas: Deltas, body: CollectedBody) -> None:
        deltas.put(text("a"), text("b", hidden=HiddenBlock(rows, 0), finish_reason="stop"))
        assert body.data == b"a\n"

    assert pumped(work) == b"a\nb\n"


def test_the_loop_gets_a_turn_between_many() -> None:
    async def work(deltas: Deltas, body: CollectedBody) -> None:
        deltas.put(*[text("x")] * 1000)
        assert 0 < len(body.data) < 2000
        deltas.put(text("", finish_reason="stop"))

    assert pumped(work) == b"x\n" * 1000 + b"\n"


@pytest.mark.parametrize("error", [QueueFull("full"), RuntimeError("ours")])
def test_what_came_before_an_error_is_written(error: Exception) -> None:
    written = CollectedBody()

    async def work(deltas: Deltas, body: CollectedBody) -> None:
        nonlocal written
        written = body
        deltas.put(text("a"), text("b"), error)

    with pytest.raises(type(error)):
        pumped(work)
    assert written.data == b"a\nb\n"
    assert written.on_writable is None


def test_an_error_in_a_thread_ends_the_stream() -> None:
    class Broken(Texts):
        def encode(self, delta: Delta) -> bytes:
            raise APIError(400, "cannot be written")

    async def main() -> None:
        deltas = Deltas()
        task = asyncio.create_task(_Pump(deltas, Broken(), CollectedBody()).finished())  # type: ignore[arg-type]
        await asyncio.sleep(0)
        deltas.put(text("a", tokens=[None] * 600))
        await asyncio.wait_for(task, 10)

    with pytest.raises(APIError, match="cannot be written"):
        asyncio.run(main())


# --- tokens that are only text ----------------------------------------------------------------------------------------


class Counted:
    num_tokens = 0


def test_plain_tokens_are_written_at_once() -> None:
    async def main() -> None:
        body, choice, end = CollectedBody(), Counted(), asyncio.get_running_loop().create_future()
        plain = _PlainTokens(choice, {1: "é", 2: None, 3: ""}, (b"<", b">"), body, end)  # type: ignore[arg-type]
        assert [plain.write(token) for token in (1, 2, 3, 4, 1)] == [True, False, False, False, True]
        assert (body.data.decode(), choice.num_tokens) == ('<"é"><"é">', 2)
        body.is_idle = False
        assert not plain.write(1)
        body.is_idle = True
        body.write = None  # type: ignore[assignment,method-assign]
        assert plain.write(1), "it is taken, and ends the stream"
        assert isinstance(end.exception(), TypeError)

    asyncio.run(main())


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stop", [True, False])
def test_plain_streams_add_up_to_whole_answers(fast: ServerProcess, route: str, stop: bool) -> None:
    """The runner echoes: whole words, characters in pieces, special tokens, and a stop token that has a text."""
    said = [*ids_of("the answer is <eos>"), BOS_ID, *byte_ids("aé龜🫠\n".encode()), EOS_ID, *ids_of("Paris")]
    last = byte_ids(b"~")
    assert last[0] not in said
    body: dict[str, Any] = {"prompt": said + last, "ignore_eos": True, "max_tokens": 3 * len(said)}
    if "chat" in route:
        body = {**body, "messages": [{"role": "user", "content": "the answer aé龜🫠\nParis~"}]}
        del body["prompt"]
    if stop:
        body["stop_token_ids"] = last
    with fast.client() as client:
        (choice,) = client.post(route, json=body).json()["choices"]
    *events, done = Stream(fast.port, route, body | {"stream": True}).rest()
    assert done == "[DONE]"
    parts = [json.loads(event)["choices"][0] for event in events]
    pieces = [part["text"] if "text" in part else part["delta"].get("content", "") for part in parts]
    assert "".join(pieces) == (choice["text"] if "text" in choice else choice["message"]["content"])
    assert "~" not in "".join(pieces) or not stop
    assert parts[-1]["finish_reason"] == choice["finish_reason"] == ("stop" if stop else "length")


def test_tokens_that_come_together_are_merged(fast: ServerProcess) -> None:
    """However many steps the server finds at once, they are one event of each stream."""
    ended = len(fast.messages("end"))
    with fast.held() as step:
        stream = fast.open_stream(500)
        step()
        next(stream.events)
        fast.signal(signal.SIGSTOP)
    try:
        eventually(lambda: len(fast.messages("end")) > ended)
    finally:
        fast.signal(signal.SIGCONT)
    *events, done = stream.rest()
    assert done == "[DONE]"
    pieces = [json.loads(event)["choices"][0]["text"] for event in events]
    longest = max(len(tokenizer().vocabulary.text_of(token) or "") for token in (5, 6, 7))
    assert max(map(len, pieces)) > 10 * longest


# --- frames -----------------------------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(pieces=st.lists(st.tuples(st.integers(0, 2), TEXTS), max_size=8), usage=st.booleans(), chat=st.booleans())
def test_a_frame_is_what_the_format_would_have_written(pieces: list[tuple[int, str]], usage: bool, chat: bool) -> None:
    given_services = services(FakeEngine(lambda *_: Line([])))
    if chat:
        form: Any = ChatFormat(
            parse(ChatRequest, {"messages": [{"role": "user", "content": "x"}]}), None, given_services
        )
    else:
        form = CompletionFormat(parse(CompletionRequest, {"prompt": "x"}), [], given_services)
    chunks = _Chunks(Deltas(), form, Envelope.new("x", "m\0", "fp"), StreamOptions(include_usage=usage))  # type: ignore[arg-type]
    chunks.encode(Delta(0, "", is_first=True))
    for index, piece in pieces:
        assert chunks.encode(Delta(index, piece)) == chunks._encode(Delta(index, piece))


# --- real connections -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fast(tiny_model: Callable[[Family], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    script = Script(model=str(tiny_model("llama")), step_seconds=0.001, max_model_len=4096)
    with ServerProcess(script, tmp_path_factory.mktemp("fast")) as server:
        yield server.wait_ready()


def chunks_of(data: bytes) -> list[dict[str, Any]]:
    """The events of an HTTP response in chunks, all of it."""
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    text = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        text += body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]
    lines = text.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_a_slow_client_gets_everything_in_fewer_events(fast: ServerProcess) -> None:
    choices, tokens = 128, 300
    body = completion(tokens, n=choices, stream=True)
    whole = fast.complete(tokens, n=choices).json()
    data = json.dumps(body).encode()
    before = len(fast.messages("end"))
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", fast.port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n"
        client.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
        received = client.recv(4096)
        # The connection is full long before all is made.
        eventually(lambda: len(fast.messages("end")) == before + choices)
        while more := client.recv(1 << 20):
            received += more
    events = chunks_of(received)
    texts = [""] * choices
    for event in events:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert len(events) < 0.9 * choices * tokens


def test_an_echo_with_many_log_probabilities(fast: ServerProcess) -> None:
    fields: dict[str, Any] = {"prompt": [5, 6, 7] * 400, "echo": True, "logprobs": 2}
    (whole,) = fast.complete(8, **fields).json()["choices"]
    stream = fast.open_stream(8, **fields)
    *events, done = stream.rest()
    assert done == "[DONE]"
    parts = [json.loads(event)["choices"][0] for event in events]
    assert len(parts) > 1
    assert "".join(part["text"] for part in parts) == whole["text"]
    for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [value for part in parts if part["logprobs"] for value in part["logprobs"][key]]
        assert streamed == whole["logprobs"][key]
