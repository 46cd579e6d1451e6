"""Drives a real engine in this process: requests go in when a test says so, tokens are collected by choice.

The engine, its scheduler, its device work and its deferred copies are the product's own; only the process boundary is
left out (tests/server has that).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig

from runner.config import RunnerConfig
from runner.engine import Engine
from runner.grammar import GrammarCompiler
from runner.kv_cache import bytes_per_block
from runner.messages import (
    DIGEST_BYTES,
    EMBEDDING_ID,
    End,
    Generate,
    HiddenRows,
    PromptLogprobs,
    SamplingParams,
    Span,
    Started,
    StepOutput,
    TokenLogprobs,
)
from runner.sequence import Request


@dataclass(frozen=True, eq=False)
class Picture:
    """An image, as its processor leaves it: float32 pixels and the number of rows that it becomes."""

    pixels: NDArray[np.float32]
    num_rows: int
    grid: tuple[int, ...] = ()


Piece = list[int] | Tensor | Picture
"""Token ids, rows [n, hidden], or an image."""
Prompt = Piece | tuple[Piece, ...]
"""One piece, or several in order."""


@dataclass
class Answer:
    """What one choice produced."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """Parallel to `tokens`."""
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_positions: list[int] = field(default_factory=list)
    """Parallel to `prompt_logprobs`."""
    hidden: list[HiddenRows] = field(default_factory=list)
    started: Started | None = None
    end: End | None = None

    @property
    def cached_tokens(self) -> int:
        assert self.started is not None
        return self.started.cached_tokens


class Harness:
    """One engine. Prompts are added under running numbers; `answers[number, choice]` is what came of them."""

    def __init__(self, path: Path, *, num_blocks: int | None = None, **overrides: Any) -> None:
        """`num_blocks`: KV blocks, the dummy included. `overrides`: of the configuration below."""
        settings: dict[str, Any] = {
            "model": str(path),
            "device": "cpu",
            "dtype": "float32",
            "max_model_len": 128,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "block_size": 16,
            "debug_checks": True,
            **overrides,
        }
        if num_blocks is not None:
            block = _bytes_per_block(path, settings["block_size"], getattr(torch, settings["dtype"]))
            settings["kv_cache_memory_bytes"] = num_blocks * block
        self.config = RunnerConfig(**settings)
        self.answers: dict[tuple[int, int], Answer] = defaultdict(Answer)
        with _seeded():
            self.engine = Engine.load(self.config, self._emit)
        assert num_blocks in (None, self.engine.info.num_blocks)
        self.grammars = GrammarCompiler(str(path), self.engine.info.vocab_size)
        self._count = 0

    def message(
        self, prompt: Prompt, max_tokens: int = 32, *, n: int = 1, salt: str = "",
        positions: NDArray[np.int32] | None = None, hints: Sequence[int | None] | None = None, **sampling: Any,
    ) -> tuple[Generate, list[memoryview]]:  # fmt: skip
        """A request (greedy unless told otherwise) as a worker would send it, under the next number. `positions`:
        [3, prompt_len], its rows' position ids. `hints`: a token for each embedding row."""
        ids: list[int] = []
        spans: list[Span] = []
        frames: list[memoryview] = []
        digests = b""
        for piece in prompt if isinstance(prompt, tuple) else (prompt,):
            if isinstance(piece, Tensor):
                data = piece.to(self.engine.model.dtype).cpu().contiguous().view(torch.uint8).numpy()
                spans.append(Span(len(ids), len(data)))
                frames.append(memoryview(data.tobytes()))
                digests += b"".join(blake2b(row.tobytes(), digest_size=DIGEST_BYTES).digest() for row in data)
                ids += [EMBEDDING_ID] * len(data)
            elif isinstance(piece, Picture):
                spans.append(self._image_span(len(ids), piece))
                frames.append(memoryview(piece.pixels.tobytes()))
                shown = blake2b(piece.pixels.tobytes(), digest_size=DIGEST_BYTES).digest()
                rows = range(piece.num_rows)
                digests += b"".join(blake2b(shown + bytes([r]), digest_size=DIGEST_BYTES).digest() for r in rows)
                ids += [EMBEDDING_ID] * piece.num_rows
            else:
                ids += piece
        number, self._count = self._count, self._count + 1
        params = SamplingParams(max_tokens, **{"temperature": 0.0, **sampling})
        packed = memoryview(np.array(ids, np.int32).tobytes())
        extra: list[memoryview] = []
        if hints is not None:
            given = np.array([EMBEDDING_ID if hint is None else hint for hint in hints], np.int32)
            extra.append(memoryview(given.tobytes()))
        if positions is not None:
            extra.append(memoryview(positions.astype(np.int32).tobytes()))
        asks: dict[str, Any] = {"has_hints": hints is not None, "has_positions": positions is not None}
        message = Generate(0, number, n, params, tuple(spans), salt, **asks)
        return message, [packed, memoryview(digests), *extra, *frames]

    def _image_span(self, start: int, picture: Picture) -> Span:
        vision = self.engine.info.vision
        two_way = vision is not None and vision.two_way
        return Span(start, picture.num_rows, two_way=two_way, pixels=picture.pixels.shape, grid=picture.grid)

    def add(self, prompt: Prompt, max_tokens: int = 32, *, n: int = 1, salt: str = "", **options: Any) -> int:
        """Queues a request; returns its number. `options`: positions, hints and sampling parameters."""
        message, frames = self.message(prompt, max_tokens, n=n, salt=salt, **options)
        model = self.engine.model
        request = Request.from_message(
            message,
            frames,
            vocab_size=model.vocab_size,
            row_size=model.hidden_size * model.dtype.itemsize,
            max_model_len=self.engine.limits.max_model_len,
            block_size=self.config.block_size,
            private_cache=not self.config.enable_prefix_caching,
            vision=self.engine.info.vision,
        )
        if message.sampling.grammar:
            request.matchers = self.grammars.compile(message.sampling.grammar, n)
        self.engine.add(request)
        return message.request

    def run(self, between: Callable[[int], None] = lambda step: None, max_steps: int = 2000) -> None:
        """Steps until nothing is left to do. `between(i)` is called before step i, and may add or abort."""
        for i in range(max_steps):
            between(i)
            if not self.engine.has_work:
                return
            self.engine.step()
        raise AssertionError(f"not done after {max_steps} steps")

    def answer(self, number: int, choice: int = 0) -> Answer:
        return self.answers[number, choice]

    def tokens(self, number: int, choice: int = 0) -> list[int]:
        return self.answers[number, choice].tokens

    def generate(self, prompt: Prompt, max_tokens: int = 32, **options: Any) -> Answer:
        """Runs one request on its own; its first choice."""
        number = self.add(prompt, max_tokens, **options)
        self.run()
        return self.answer(number)

    def assert_empty(self) -> None:
        """Every slot and block has come back, and the memory of the prompts' embeddings."""
        scheduler = self.engine.scheduler
        assert scheduler.pool.num_used == 0
        assert scheduler.num_running == 0
        assert sorted(scheduler.table.free) == list(range(self.engine.limits.max_num_seqs))
        assert not scheduler.requests and not scheduler.waiting and scheduler.num_in_flight == 0
        assert self.engine.stats().row_bytes == 0

    def fill_with_garbage(self, *, cache: bool) -> None:
        """What an idle engine's earlier life may have left in its slots and buffers, at its worst: a value read before
        it is written must show in the output.

        `cache`: the cached keys and values as well. Prefixes are then found and wrong, so ask under a new salt.
        """
        assert not self.engine.has_work
        with _seeded():
            self._fill_device_with_garbage()
            if cache:
                self.engine.device.cache.fill_with_garbage()
        table, random = self.engine.scheduler.table, np.random.default_rng(0)
        table.token_ids[:] = random.integers(0, self.engine.model.vocab_size, table.token_ids.shape)
        table.stop_ids[:] = random.integers(0, self.engine.model.vocab_size, table.stop_ids.shape)
        table.blocks[:] = random.integers(0, self.engine.info.num_blocks, table.blocks.shape)
        for counter in (table.num_blocks, table.length, table.computed, table.known, table.prompt_len, table.limit):
            counter[:] = random.integers(0, self.engine.limits.max_model_len, counter.shape)

    def _fill_device_with_garbage(self) -> None:
        device = self.engine.device
        device.slots.fill_with_garbage(self.engine.model.vocab_size, device.cache.num_blocks)
        device.sampling.floats.uniform_(0.2, 1.8)
        device.sampling.ints.random_(1, 1000)
        for rows in (device.rows, device._hidden, device._latents._rows):
            rows.fill_(math.nan)
        device.upload.random_()
        inputs = device.inputs
        for buffer in (inputs.token_ids, inputs.positions, inputs.cache_index, inputs.seq_lens, inputs.last_rows):
            buffer.random_()
        inputs.is_token_ids.random_(2)
        inputs.samples.random_(2)

    def _emit(self, worker: int, output: StepOutput) -> None:
        assert worker == 0
        logprobs = output.logprobs or [None] * len(output.tokens)
        for request, choice, token, logprob in zip(
            output.requests, output.choices, output.tokens, logprobs, strict=True
        ):
            answer = self.answers[request, choice]
            assert answer.end is None, "a token after the end"
            answer.tokens.append(token)
            answer.logprobs.append(logprob)
        for started in output.started:
            answer = self.answers[started.request, started.choice]
            assert answer.started is None, "started twice"
            answer.started = started
        for part in output.prompt_logprobs:
            self._add_prompt_logprobs(part)
        for rows in output.hidden:
            answer = self.answers[rows.request, rows.choice]
            assert answer.end is None, "hidden states after the end"
            answer.hidden.append(rows)
        for end in output.ends:
            answer = self.answers[end.request, end.choice]
            assert answer.end is None, "ended twice"
            answer.end = end

    def _add_prompt_logprobs(self, part: PromptLogprobs) -> None:
        answer = self.answers[part.request, 0]
        answer.prompt_positions += range(part.start, part.start + len(part.entries))
        answer.prompt_logprobs += part.entries


@contextmanager
def _seeded() -> Iterator[None]:
    """Garbage is the same in every run."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def _bytes_per_block(path: Path, block_size: int, dtype: torch.dtype) -> int:
    config = AutoConfig.from_pretrained(path).get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shapes = [(config.num_key_value_heads, head_dim)] * config.num_hidden_layers
    return bytes_per_block(shapes, block_size, dtype)
