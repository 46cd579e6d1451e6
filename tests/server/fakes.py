"""What tests of the routes work with: an engine that follows a script, and an application around it.

The engine is fake, its streams are real: the same `Inbox` and `GenerationStream` that the engine client fills. Nothing
here listens on a port or starts a process.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from fastapi import FastAPI

from runner.embedding_store import EmbeddingStore
from runner.messages import (
    End,
    FinishReason,
    HiddenRows,
    ModelInfo,
    PromptLogprobs,
    PutRows,
    SamplingParams,
    Started,
    StoreAnswer,
    TokenLogprobs,
    ToRecords,
    ToStore,
    decode_to_runner,
)
from runner.record_messages import answer as answer_about_records
from runner.record_store import RecordStore
from runner.store_messages import answer
from server import (
    abort,
    chat,
    completions,
    models,
    prompt_embeds,
    render,
    text_embeddings,
    token_embeddings,
    tokenize,
)
from server.chat_template import ChatTemplate
from server.errors import APIError, install_error_handlers
from server.generation import GenerationStream, Inbox
from server.grammars import Grammars
from server.metrics import Metrics
from server.prompt import PromptRows
from server.questions import Questions, Replied
from server.responses import routes as responses
from server.responses.store import ResponseStore
from server.sampling import GenerationDefaults
from server.services import Services
from server.stored_embeddings import StoredEmbeddings
from server.tokenizer import Tokenizer
from tests.models import EOS_ID, HIDDEN_SIZE, VOCAB_SIZE, build_tokenizer

MODEL = ModelInfo(
    path="",
    model_type="llama",
    dtype="float32",
    hidden_size=HIDDEN_SIZE,
    vocab_size=VOCAB_SIZE,
    max_model_len=128,
    block_size=16,
    num_blocks=64,
    max_num_seqs=8,
)
NAMES = ("tiny", "org/tiny")


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(build_tokenizer())


@functools.cache
def metrics() -> Metrics:
    """Every engine's, which nobody reads: a process has one for as long as it lives, and a descriptor with it."""
    return Metrics("tiny")


def ids_of(text: str) -> list[int]:
    """The text's ids, without special ones unless the text names them."""
    return list(tokenizer().transformers.backend_tokenizer.encode(text, add_special_tokens=False).ids)


def byte_ids(data: bytes) -> list[int]:
    """One token for each byte: every character that is not ASCII is split over several."""
    table = {tokenizer().vocabulary.bytes_of(token_id): token_id for token_id in range(VOCAB_SIZE)}
    return [table[bytes([value])] for value in data]


@dataclass(frozen=True)
class Line:
    """What the engine says for one choice."""

    tokens: Sequence[int]
    reason: FinishReason = "stop"
    stop_token: int | None = None
    """Default: the last token, if it is one of the request's stop ids."""
    message: str = ""


Script = Callable[[Sequence[int], int], Line]
"""(the prompt's ids, the choice's number) to what is said."""


def say(text: str) -> Script:
    """Every choice says `text` and ends like a model: with the end-of-sequence token."""
    return lambda _prompt, _choice: Line([*ids_of(text), EOS_ID])


@dataclass
class Submitted:
    """A request that the engine got, and what became of it."""

    prompt: PromptRows
    sampling: SamplingParams
    n: int
    cache_salt: str
    priority: int = 0
    aborted: list[int] = field(default_factory=list)


class FakeEngine:
    """`tokens_per_event`: how many tokens arrive together. `refuse`: what the first calls raise. `fail_after`: so many
    tokens, and the engine dies."""

    def __init__(
        self,
        script: Script,
        *,
        tokens_per_event: int = 1,
        refuse: Sequence[APIError | None] = (),
        fail_after: int | None = None,
        hang: bool = False,
    ) -> None:
        self.submitted: list[Submitted] = []
        self.forgotten = 0
        self._script = script
        self._tokens_per_event = tokens_per_event
        self._refuse = list(refuse)
        self._fail_after = fail_after
        self._hang = hang
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers: dict[int, Submitted] = {}

    async def generate(
        self, prompt: PromptRows, sampling: SamplingParams, n: int = 1, cache_salt: str = "", priority: int = 0
    ) -> GenerationStream:
        refusal = self._refuse.pop(0) if self._refuse else None
        if refusal is not None:
            await asyncio.sleep(0.01)
            raise refusal
        submitted = Submitted(prompt, sampling, n, cache_salt, priority)
        self.submitted.append(submitted)
        inbox = Inbox(len(self.submitted), n, len(prompt), metrics(), None)
        self._numbers[inbox.request] = submitted
        inbox.accept()
        task = asyncio.get_running_loop().create_task(self._run(inbox, submitted))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return GenerationStream(self, inbox)

    async def token_rows(self, token_ids: Sequence[int]) -> list[bytes]:
        """Every value of an id's row is the id."""
        return [np.full((1, HIDDEN_SIZE), each, np.float32).tobytes() for each in token_ids]

    async def abort_answer(self, answer_id: str) -> bool:
        return False

    def abort(self, inbox: Inbox, choice: int) -> None:
        self._numbers[inbox.request].aborted.append(choice)

    def forget(self, inbox: Inbox) -> None:
        self.forgotten += 1

    async def _run(self, inbox: Inbox, submitted: Submitted) -> None:
        ids = [int(token_id) for token_id in submitted.prompt.token_ids]
        sampling = submitted.sampling
        await asyncio.sleep(0)
        for choice in range(submitted.n):
            inbox.add_started(Started(inbox.request, choice, 2 if choice == 0 else 99, 0.0))
        if sampling.prompt_logprobs is not None:
            # In two parts, as a prompt longer than a chunk has them.
            entries = [self._logprobs(token_id, sampling.prompt_logprobs) for token_id in ids[1:]]
            for part in (slice(0, len(entries) // 2), slice(len(entries) // 2, None)):
                inbox.add_prompt_logprobs(PromptLogprobs(inbox.request, 1 + (part.start or 0), tuple(entries[part])))
                await asyncio.sleep(0)
        lines = [self._line(ids, choice, sampling) for choice in range(submitted.n)]
        if sampling.return_hidden_states in ("last", "mean"):
            for choice, line in enumerate(lines):
                self._add_hidden(inbox, choice, len(ids) + max(len(line.tokens) - 1, 0) - 1, 1)
        elif sampling.return_hidden_states == "all":
            self._add_hidden(inbox, 0, 0, len(ids) - 1)
        sent = 0
        if self._hang:
            await asyncio.sleep(3600)
        longest = max(len(line.tokens) for line in lines)
        for start in range(0, max(longest, 1), self._tokens_per_event):
            await asyncio.sleep(0)
            for choice, line in enumerate(lines):
                if inbox.ended[choice]:
                    continue
                if start + self._tokens_per_event >= len(line.tokens):
                    inbox.direct = None  # as the engine client does it for a step with the choice's end
                for offset, token in enumerate(line.tokens[start : start + self._tokens_per_event]):
                    if sent == self._fail_after:
                        inbox.fail(APIError(503, "The engine stopped.", type="server_error", code="engine_failed"))
                        return
                    sent += 1
                    if sampling.return_hidden_states in ("answer", "all"):
                        self._add_hidden(inbox, choice, len(ids) - 1 + start + offset, 1)
                    entry = None if sampling.logprobs is None else self._logprobs(token, sampling.logprobs)
                    inbox.add_token(choice, token, entry, 0.0)
                if start + self._tokens_per_event >= len(line.tokens):
                    inbox.add_end(End(inbox.request, choice, line.reason, line.stop_token, line.message))

    @staticmethod
    def _add_hidden(inbox: Inbox, choice: int, start: int, count: int) -> None:
        """Every value of a position's state is the position, and a tenth of the choice."""
        rows = np.repeat(np.arange(start, start + count, dtype=np.float32)[:, None] + choice / 10, HIDDEN_SIZE, 1)
        if count > 0:
            inbox.add_hidden(HiddenRows(inbox.request, choice, start, rows.tobytes()))

    def _line(self, ids: Sequence[int], choice: int, sampling: SamplingParams) -> Line:
        line = self._script(ids, choice)
        tokens = list(line.tokens)
        for position, token in enumerate(tokens[: sampling.max_tokens]):
            if token in sampling.stop_token_ids and position >= sampling.min_tokens:
                return Line(tokens[: position + 1], "stop", token)
        if len(tokens) >= sampling.max_tokens:
            return Line(tokens[: sampling.max_tokens], "length")
        return line

    @staticmethod
    def _logprobs(token: int, k: int) -> TokenLogprobs:
        """The token itself is always the second best, at -1; the best is its neighbour."""
        top = [((token + 1 + 2 * rank) % VOCAB_SIZE if rank != 1 else token) for rank in range(k)]
        return TokenLogprobs(token, -1.0, 2, tuple(top), tuple(-0.5 * (1 + rank) for rank in range(k)))


class StoreHarness:
    """A runner's store and a worker's side of it, without the sockets between them."""

    def __init__(self, max_bytes: int = 1 << 20, **options: Any) -> None:
        self.store = EmbeddingStore(max_bytes, options.pop("max_owner_bytes", max_bytes), 3600.0, **options)
        self._questions: Questions[StoreAnswer] = Questions(self._send, lambda: None)
        self.stored = StoredEmbeddings(0, self._questions, 1 << 30)
        self.puts: list[PutRows] = []

    def _send(self, *frames: bytes | memoryview) -> bool:
        message = decode_to_runner(frames[0])
        assert isinstance(message, ToStore)
        if isinstance(message, PutRows):
            self.puts.append(message)
        rows = [memoryview(bytes(frame)) for frame in frames[1:]]
        found = answer(self.store, message, rows, HIDDEN_SIZE * 4)
        asyncio.get_running_loop().call_soon(self._questions.on_answer, found.request, found)
        return True


class RecordsHarness:
    """A runner's store of records and a worker's side of it, without the sockets between them."""

    def __init__(self, **options: Any) -> None:
        self.store = RecordStore(**options)
        self._questions: Questions[Replied] = Questions(self._send, lambda: None)
        self.responses = ResponseStore(0, self._questions)

    def _send(self, *frames: bytes | memoryview) -> bool:
        message = decode_to_runner(frames[0])
        assert isinstance(message, ToRecords)
        reply, found = answer_about_records(self.store, message, [memoryview(bytes(frame)) for frame in frames[1:]])
        frames_behind = [memoryview(each) for each in found]
        asyncio.get_running_loop().call_soon(self._questions.on_answer, reply.request, (reply, frames_behind))
        return True


def services(engine: FakeEngine, **changes: Any) -> Services:
    values: dict[str, Any] = {
        "engine": engine,
        "model": MODEL,
        "tokenizer": tokenizer(),
        "chat_template": ChatTemplate(tokenizer()),
        "defaults": GenerationDefaults(eos_token_ids=(EOS_ID,)),
        "grammars": Grammars(tokenizer(), VOCAB_SIZE),
        "served_model_names": NAMES,
        "responses": RecordsHarness().responses,
        **changes,
    }
    return Services(**values)


def application(given: Services) -> FastAPI:
    app = FastAPI()
    install_error_handlers(app)
    routes = (completions, chat, responses, prompt_embeds, text_embeddings, token_embeddings)
    for module in (*routes, render, models, tokenize, abort):
        app.include_router(module.router)
    app.state.services = given
    return app


class Api:
    """A client of an application in the same process. One request at a time, each in an event loop of its own."""

    def __init__(self, given: Services) -> None:
        self._app = application(given)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        content = {"json": body} if "content" not in options else {}
        return asyncio.run(self._send("POST", path, **content, **options))

    def get(self, path: str) -> httpx.Response:
        return asyncio.run(self._send("GET", path))

    def delete(self, path: str) -> httpx.Response:
        return asyncio.run(self._send("DELETE", path))

    async def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self._app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)


@contextmanager
def api(script: Script, **options: Any) -> Iterator[tuple[Api, FakeEngine]]:
    """`options`: arguments of FakeEngine."""
    engine = FakeEngine(script, **options)
    yield Api(services(engine)), engine


@asynccontextmanager
async def loop_turns() -> AsyncIterator[Callable[[], int]]:
    """How often the event loop has gone round so far."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.ensure_future(count())
    try:
        yield lambda: turns
    finally:
        counting.cancel()
