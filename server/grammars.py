"""From what a client asks of an answer's form to the grammar that the runner follows. Part of `services`.

Compiling happens in processes of its own (`grammar_child`), off the event loop and under limits of time and memory: it
finds out whether the grammar is valid and can be afforded, and its result is remembered. The runner compiles it once
more, knowing that it can.
"""

from __future__ import annotations

import asyncio
import queue
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b

import msgspec

from server.errors import InvalidRequest, QueueFull, Unavailable, UnsupportedParameter
from server.grammar_child import Job, Reply, Setup
from server.grammar_process import TOO_COSTLY, GrammarProcess, TokenizerUnsupported
from server.json_schema import parse_schema
from server.structured_outputs import Constraint
from server.tokenizer import Tokenizer

_PROCESSES = 2
"""Started when first needed."""
_MAX_WAITING = 256
_CACHE_BYTES = 16 << 20
_MAX_REQUEST_BYTES = 16 << 20
"""A grammar travels to the runner with every prompt of its request."""

_NO_TOKENIZER = Reply(error="tokenizer")
_NO_PROCESS = Reply(error="process")


class Grammars:
    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, on_compiled: Callable[[float], None] = lambda seconds: None
    ) -> None:
        """`on_compiled`: told of each grammar that was not remembered, how many seconds it took."""
        self._tokenizer = tokenizer
        self._on_compiled = on_compiled
        self._vocab_size = vocab_size
        self._threads = ThreadPoolExecutor(_PROCESSES, thread_name_prefix="grammar")
        self._idle: queue.SimpleQueue[GrammarProcess] = queue.SimpleQueue()
        self._processes: set[GrammarProcess] = set()
        self._closed = False
        self._running: dict[bytes, asyncio.Task[Reply]] = {}
        self._known: OrderedDict[bytes, Reply] = OrderedDict()
        """Least recently used first."""
        self._known_bytes = 0

    async def compile(self, constraint: Constraint | None, num_prompts: int = 1) -> str:
        """`SamplingParams.grammar` for `constraint`. Raises APIError: 400 for what is not valid, not supported or too
        complex, 429 while too many others wait."""
        if constraint is None:
            return ""
        # A schema is checked part by part, which takes a few milliseconds for a large one.
        job = await asyncio.to_thread(_job_of, constraint) if constraint.kind == "json" else _job_of(constraint)
        return await self._compile(job, constraint.param, num_prompts)

    async def check(self, grammar: str, param: str, num_prompts: int = 1) -> str:
        """`grammar`, a text of llguidance's own, if the runner can follow it. Raises as `compile` does."""
        return await self._compile(Job("compiled", grammar), param, num_prompts)

    def close(self) -> None:
        """Ends the processes; what waits for them gets 503. Waits a moment for the threads."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in list(self._processes):
            process.interrupt()
        self._threads.shutdown()
        for process in self._processes:
            process.kill()

    async def _compile(self, job: Job, param: str, num_prompts: int) -> str:
        reply = await self._reply(job)
        if reply is _NO_TOKENIZER:
            raise UnsupportedParameter(f"{param} is not possible with this model's tokenizer.", param=param)
        if reply is _NO_PROCESS:
            raise Unavailable("Structured outputs are not available now.")
        if reply.error:
            raise InvalidRequest(f"{param} cannot be used: {reply.error}.", param=param)
        if len(reply.grammar) * num_prompts > _MAX_REQUEST_BYTES:
            raise InvalidRequest(f"{param} is too large for {num_prompts} prompts in one request.", param=param)
        return reply.grammar

    async def _reply(self, job: Job) -> Reply:
        key = blake2b(msgspec.msgpack.encode(job), digest_size=16).digest()
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            return known
        task = self._running.get(key)
        if self._closed:
            return _NO_PROCESS
        if task is None:
            if len(self._running) >= _MAX_WAITING:
                raise QueueFull("Too many structured outputs are waiting to be compiled.")
            task = self._running[key] = asyncio.create_task(self._run(key, job))
        # Others may wait for the same: a client that leaves must not take it from them.
        return await asyncio.shield(task)

    async def _run(self, key: bytes, job: Job) -> Reply:
        started = time.monotonic()
        try:
            reply = await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, job)
        finally:
            del self._running[key]
        self._on_compiled(time.monotonic() - started)
        if reply.error not in (TOO_COSTLY, _NO_PROCESS.error):  # which another time may not be
            self._remember(key, reply)
        return reply

    def _remember(self, key: bytes, reply: Reply) -> None:
        self._known[key] = reply
        self._known_bytes += _size(reply)
        while self._known_bytes > _CACHE_BYTES:
            self._known_bytes -= _size(self._known.popitem(last=False)[1])

    # --- in the threads -------------------------------------------------------------------------------------------

    def _ask(self, job: Job) -> Reply:
        try:
            process = self._process()
        except TokenizerUnsupported:
            return _NO_TOKENIZER
        except OSError:
            return _NO_PROCESS
        reply = _NO_PROCESS if self._closed else process.compile(job)
        if process.is_alive:
            self._idle.put(process)
        else:
            self._processes.discard(process)
        return reply

    def _process(self) -> GrammarProcess:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            pass
        tokenizer, ending = self._tokenizer, self._tokenizer.eos_token_id
        if ending is None:
            raise TokenizerUnsupported
        size = max(self._vocab_size, tokenizer.vocabulary.size)
        process = GrammarProcess(Setup(tokenizer.as_json(), size, ending))
        self._processes.add(process)
        return process


def _size(reply: Reply) -> int:
    return len(reply.grammar) + len(reply.error) + 200


def _job_of(constraint: Constraint) -> Job:
    kind, value = constraint.kind, constraint.value
    if kind == "json":
        schema = parse_schema(value, constraint.param)
        return Job(kind, schema, constraint.whitespace_pattern, constraint.compact)
    return Job(kind, msgspec.json.encode(value).decode() if kind == "choice" else value)
