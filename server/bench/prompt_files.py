"""Workloads that come from files: stored prompts, and traces of when requests of which lengths came.

The readers raise `FileError`, with the line, for what they can't read. Times and lengths of a trace are those of the
traces that came with Mooncake: `timestamp` in ms, `input_length`, `output_length`, and `hash_ids`, one for each block
of 512 rows; blocks of the same number hold the same ids here, so that what was shared in the trace is shared again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from server.bench.workloads import (
    Common,
    Prepared,
    RandomIds,
    RandomText,
    Workload,
    chat_request,
    completion,
    random_ids,
    text_request,
)

TRACE_BLOCK = 512
MAX_ROWS = 1 << 24
_CHARACTERS_PER_TOKEN = 4
"""By which the length of a recorded answer is guessed: a tokenizer would have to be the server's own."""
_WARMUP_ROWS = 64


class FileError(Exception):
    """The file can't be used. The message is for the user."""


@dataclass(frozen=True)
class StoredPrompt:
    """One of `text`, `ids` and `messages` is not None."""

    text: str | None = None
    ids: tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    output_len: int | None = None


@dataclass(frozen=True)
class StoredPrompts:
    """A file's prompts, in its order."""

    common: Common
    prompts: tuple[StoredPrompt, ...]
    chat: bool = False
    """Send texts as chat messages. (Messages always are.)"""

    def prepare(self, index: int) -> Prepared:
        prompt = self.prompts[index % len(self.prompts)]
        length = prompt.output_len or self.common.output_len
        if prompt.messages is not None:
            return chat_request(self.common, prompt.messages, length)
        if prompt.ids is not None:
            return completion("ids", length, self.common.body(length, prompt=prompt.ids))
        return text_request(self.common, prompt.text or "", length, chat=self.chat)

    def others(self, offset: int) -> Workload:
        first = self.prompts[0]
        if first.ids is not None:
            return RandomIds(self.common, _WARMUP_ROWS, max(4, *first.ids), seed=offset)
        return RandomText(self.common, _WARMUP_ROWS, offset, self.chat or first.messages is not None)


class TraceEntry(msgspec.Struct, frozen=True):
    timestamp: float
    """Milliseconds."""
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class TracePrompts:
    """Random ids of a trace's lengths, with its shared blocks."""

    common: Common
    entries: tuple[TraceEntry, ...]
    vocab_size: int = 32_000
    seed: int = 0

    def prepare(self, index: int) -> Prepared:
        entry = self.entries[index % len(self.entries)]
        blocks = [random_ids((self.seed, 8, block), TRACE_BLOCK, self.vocab_size) for block in entry.hash_ids]
        ids = list(itertools.chain.from_iterable(blocks))[: entry.input_length]
        ids += random_ids((self.seed, 9, index), entry.input_length - len(ids), self.vocab_size)
        return completion("ids", entry.output_length, self.common.body(entry.output_length, prompt=ids))

    def others(self, offset: int) -> Workload:
        return RandomIds(self.common, _WARMUP_ROWS, self.vocab_size, self.seed + offset)

    def times(self, speed: float) -> tuple[float, ...]:
        """Seconds after the first entry, `speed` times as fast as recorded."""
        return tuple((entry.timestamp - self.entries[0].timestamp) / 1e3 / speed for entry in self.entries)


def read_prompts(path: Path, limit: int | None) -> tuple[StoredPrompt, ...]:
    """The file's first `limit` prompts. Entries without one (a conversation that nobody began) are passed over."""
    found = (prompt for place, entry in _entries(path) if (prompt := _prompt(path, place, entry)) is not None)
    prompts = tuple(itertools.islice(found, limit))
    if not prompts:
        raise FileError(f"{path.name} has no prompts")
    return prompts


def read_trace(path: Path, limit: int | None) -> tuple[TraceEntry, ...]:
    """The file's first `limit` entries, by time."""
    entries = []
    for place, entry in itertools.islice(_entries(path), limit):
        try:
            read = msgspec.convert(entry, TraceEntry)
        except msgspec.ValidationError as error:
            raise FileError(f"{path.name}, {place}: {error}") from None
        lengths_fit = 1 <= read.input_length <= MAX_ROWS and 1 <= read.output_length <= MAX_ROWS
        if not lengths_fit or min(read.hash_ids, default=0) < 0 or not 0 <= read.timestamp < 1e15:
            raise FileError(f"{path.name}, {place}: lengths must be positive, timestamp and hash_ids not negative")
        entries.append(read)
    if not entries:
        raise FileError(f"{path.name} has no entries")
    return tuple(sorted(entries, key=lambda entry: entry.timestamp))


def _entries(path: Path) -> Iterator[tuple[str, Any]]:
    """(place, entry): lines, or members of one array."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FileError(f"can't read {path.name}: {error.strerror}") from None
    if content.lstrip()[:1] == b"[":
        for number, entry in enumerate(_decode(path, "the array", content)):
            yield f"entry {number}", entry
        return
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            yield f"line {number}", _decode(path, f"line {number}", line)


def _decode(path: Path, place: str, content: bytes) -> Any:
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise FileError(f"{path.name}, {place}: {error}") from None


def _prompt(path: Path, place: str, entry: Any) -> StoredPrompt | None:
    if not isinstance(entry, dict):
        raise FileError(f"{path.name}, {place}: not an object")
    length = entry.get("output_len", entry.get("max_tokens"))
    if length is not None and not (type(length) is int and 1 <= length <= MAX_ROWS):
        raise FileError(f"{path.name}, {place}: output_len is not a positive number")
    prompt, messages = entry.get("prompt"), entry.get("messages")
    if isinstance(prompt, str) and prompt:
        return StoredPrompt(text=prompt, output_len=length)
    if isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt):
        return StoredPrompt(ids=tuple(prompt), output_len=length)
    if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
        return StoredPrompt(messages=tuple(messages), output_len=length)
    if isinstance(entry.get("conversations"), list):
        return _conversation(entry["conversations"], length)
    raise FileError(f"{path.name}, {place}: has no prompt (text or ids), messages or conversations")


def _conversation(turns: list[Any], length: int | None) -> StoredPrompt | None:
    """Its first question, and about as long an answer as was recorded."""
    texts = [(turn.get("from"), turn.get("value")) for turn in turns if isinstance(turn, dict)]
    for (who, question), (answerer, answer) in itertools.pairwise(texts):
        if who in ("human", "user") and answerer in ("gpt", "assistant") and question and isinstance(question, str):
            guess = max(1, len(answer) // _CHARACTERS_PER_TOKEN) if isinstance(answer, str) else None
            return StoredPrompt(text=question, output_len=length or guess)
    return None
