"""What is sent: workloads of random prompts, as token ids, as prompt embeddings, as text, or in a mix.

A workload makes request number `index` out of (seed, index) alone, so that any client process can make any request,
in any order, and a second run sends the same. Requests are made just before they are sent, in some 50 µs each, and not
kept: an embedding prompt of an 8B model is 5 MB.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import pybase64

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
EmbedsDtype = Literal["bfloat16", "float16", "float32"]
_FILE_DTYPES: Mapping[EmbedsDtype, str] = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True, slots=True)
class Prepared:
    """One request, ready to be sent."""

    kind: str
    path: str
    body: tuple[bytes, ...]
    """In pieces, so that large parts that many requests share are not copied for each."""
    output_len: int
    content_type: str = "application/json"


@dataclass(frozen=True)
class Common:
    """What all requests of a run have in common."""

    model: str
    output_len: int = 128
    temperature: float = 0.0
    ignore_eos: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further members of every body; they win."""

    def body(self, output_len: int, **prompt: Any) -> dict[str, Any]:
        return {
            "model": self.model,
            **prompt,
            "max_tokens": output_len,
            "temperature": self.temperature,
            "ignore_eos": self.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }


class Workload(Protocol):
    def prepare(self, index: int) -> Prepared:
        """Request number `index`, always the same."""

    def others(self, offset: int) -> Workload:
        """Requests of the same kind that have no beginning in common with these: for warming up."""


@dataclass(frozen=True)
class RandomIds:
    """Prompts of random token ids in [3, vocab_size): the first few ids are special in most vocabularies."""

    common: Common
    input_len: int
    vocab_size: int = 32_000
    seed: int = 0
    prefix_len: int = 0
    """Rows at the beginning that all prompts of a group have in common; they count towards `input_len`."""
    num_prefixes: int = 1
    """Request `index` is in group `index % num_prefixes`."""

    def prepare(self, index: int) -> Prepared:
        ids = random_ids((self.seed, 1, index), self.input_len - self.prefix_len, self.vocab_size)
        if self.prefix_len:
            ids = [*self._prefixes[index % self.num_prefixes], *ids]
        length = self.common.output_len
        return completion("ids", length, self.common.body(length, prompt=ids))

    def others(self, offset: int) -> Workload:
        return replace(self, seed=self.seed + offset)

    @cached_property
    def _prefixes(self) -> list[list[int]]:
        groups = range(self.num_prefixes)
        return [random_ids((self.seed, 2, group), self.prefix_len, self.vocab_size) for group in groups]


@dataclass(frozen=True)
class RandomEmbeds:
    """Prompts of normally distributed rows: base64 of a safetensors file with one tensor [input_len, hidden_size].

    Only the first three rows differ from request to request: enough that no prefix cache finds anything, and the rest
    can be encoded once. Three rows because base64 takes bytes in threes.
    """

    common: Common
    input_len: int
    hidden_size: int
    dtype: EmbedsDtype = "bfloat16"
    std: float = 0.02
    seed: int = 0

    OWN_ROWS = 3

    def prepare(self, index: int) -> Prepared:
        before, header, shared, after = self._pieces
        own = self._rows((self.seed, 3, index), min(self.OWN_ROWS, self.input_len))
        pieces = (before, pybase64.b64encode(header + own), shared, after)
        return Prepared("embeds", COMPLETIONS, pieces, self.common.output_len)

    def others(self, offset: int) -> Workload:
        return replace(self, seed=self.seed + offset)

    @cached_property
    def _pieces(self) -> tuple[bytes, bytes, bytes, bytes]:
        """The JSON before the file, the file's header, its shared rows in base64, the JSON behind it."""
        before = encode(self.common.body(self.common.output_len))[:-1] + b',"prompt_embeds":"'
        rest = max(0, self.input_len - self.OWN_ROWS)
        shared = pybase64.b64encode(self._rows((self.seed, 4), rest))
        return before, self._header(), shared, b'"}'

    def _header(self) -> bytes:
        """Padded with spaces, which the format allows, to a multiple of 24: of 8 for it and of 3 for base64."""
        size = self.input_len * self.hidden_size * (4 if self.dtype == "float32" else 2)
        entry = {"dtype": _FILE_DTYPES[self.dtype], "shape": [self.input_len, self.hidden_size]}
        text = json.dumps({"rows": {**entry, "data_offsets": [0, size]}}).encode()
        text = text.ljust(-(-(len(text) + 8) // 24) * 24 - 8)
        return len(text).to_bytes(8, "little") + text

    def _rows(self, key: tuple[int, ...], count: int) -> bytes:
        values = np.random.default_rng(key).standard_normal((count, self.hidden_size), np.float32)
        values *= np.float32(self.std)
        if self.dtype == "bfloat16":
            return (values.view(np.uint32) >> 16).astype("<u2").tobytes()  # cut, not rounded: they are random anyway
        return values.astype("<f2" if self.dtype == "float16" else "<f4").tobytes()


@dataclass(frozen=True)
class RandomText:
    """Prompts of common English words, about one token each; how many tokens it was, the server's usage says."""

    common: Common
    input_len: int
    seed: int = 0
    chat: bool = False

    def prepare(self, index: int) -> Prepared:
        return text_request(self.common, self.words(index), self.common.output_len, chat=self.chat)

    def words(self, index: int) -> str:
        return " ".join(np.random.default_rng((self.seed, 5, index)).choice(_WORDS, self.input_len))

    def others(self, offset: int) -> Workload:
        return replace(self, seed=self.seed + offset)


@dataclass(frozen=True)
class Mixed:
    """Requests drawn from several workloads, by weight. Which one is drawn follows from the index."""

    parts: tuple[Workload, ...]
    weights: tuple[float, ...]
    seed: int = 0

    def prepare(self, index: int) -> Prepared:
        point = np.random.default_rng((self.seed, 6, index)).random() * sum(self.weights)
        chosen = int(np.searchsorted(np.cumsum(self.weights), point, side="right"))
        return self.parts[min(chosen, len(self.parts) - 1)].prepare(index)

    def others(self, offset: int) -> Workload:
        return replace(self, parts=tuple(part.others(offset) for part in self.parts), seed=self.seed + offset)


def text_request(common: Common, text: str, output_len: int, *, chat: bool) -> Prepared:
    if chat:
        return chat_request(common, [{"role": "user", "content": text}], output_len)
    return completion("text", output_len, common.body(output_len, prompt=text))


def chat_request(common: Common, messages: Sequence[Any], output_len: int) -> Prepared:
    return Prepared("messages", CHAT, (encode(common.body(output_len, messages=messages)),), output_len)


def completion(kind: str, output_len: int, body: Mapping[str, Any]) -> Prepared:
    return Prepared(kind, COMPLETIONS, (encode(body),), output_len)


encode = msgspec.json.Encoder().encode


def random_ids(key: tuple[int, ...], count: int, vocab_size: int) -> list[int]:
    ids: list[int] = np.random.default_rng(key).integers(3, vocab_size, count).tolist()
    return ids


_VOCABULARY = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father "
    "power hour game line end member law car city name team minute idea kid body back parent face level office door "
    "health person art war history party result change morning reason research girl guy moment air teacher force"
)
_WORDS = _VOCABULARY.split()
