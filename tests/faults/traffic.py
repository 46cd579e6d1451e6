"""Requests of every kind that the server takes, drawn from a seed. All are valid: what is done with them is not."""

from __future__ import annotations

import base64
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.numpy
from numpy.typing import NDArray

from tests.models import CORPUS, VOCAB_SIZE, embed

Body = dict[str, Any]
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
WORDS = CORPUS.split()
SCHEMA = {
    "type": "object",
    "properties": {"wood": {"enum": ["oak", "elm"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["wood", "size"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "cut", "description": "Cuts a board.", "parameters": SCHEMA}}


class Traffic:
    """`model`: the folder of the tiny model, whose embedding table the rows are taken from."""

    def __init__(self, model: Path, seed: int, *, max_tokens: int = 40) -> None:
        self._rng = random.Random(seed)
        self._max_tokens = max_tokens
        self._table: NDArray[Any] = embed(model, range(VOCAB_SIZE)).numpy()
        self.kinds: dict[str, Callable[[], tuple[str, Body]]] = {
            "ids": self.ids,
            "text": self.text,
            "embeds": self.embeds,
            "mixed": self.mixed,
            "chat": self.chat,
            "tools": self.tools,
            "grammar": self.grammar,
            "responses": self.responses,
        }

    def draw(self, kind: str | None = None, *, stream: bool | None = None) -> tuple[str, Body]:
        """Path and body."""
        rng = self._rng
        path, body = self.kinds[kind or rng.choice(list(self.kinds))]()
        body = {"model": "m", "stream": rng.random() < 0.5 if stream is None else stream, **body}
        if rng.random() < 0.5:
            body |= {"temperature": rng.choice([0, 0.7, 1.5]), "top_p": rng.choice([0.5, 1])}
        if path != RESPONSES and rng.random() < 0.2:
            body["n"] = rng.randint(2, 3)
        if rng.random() < 0.1:
            body["cache_salt"] = rng.choice(["a", "b"])
        return path, body

    def _tokens(self) -> int:
        return self._rng.randint(1, self._max_tokens)

    def _ids(self, low: int = 1, high: int = 120) -> list[int]:
        return [self._rng.randint(4, VOCAB_SIZE - 1) for _ in range(self._rng.randint(low, high))]

    def _words(self) -> str:
        return " ".join(self._rng.choice(WORDS) for _ in range(self._rng.randint(1, 20)))

    def _rows(self, high: int = 60) -> str:
        rows = self._table[self._ids(1, high)]
        return base64.b64encode(safetensors.numpy.save({"rows": rows})).decode()

    def _open_ended(self) -> Body:
        return {"max_tokens": self._tokens(), "ignore_eos": True}

    def ids(self) -> tuple[str, Body]:
        several = self._rng.random() < 0.2
        prompt = [self._ids(high=20) for _ in range(3)] if several else self._ids()
        return COMPLETIONS, {"prompt": prompt, **self._open_ended()}

    def text(self) -> tuple[str, Body]:
        extra = {"logprobs": 3} if self._rng.random() < 0.3 else {"stop": ["zz"]}
        return COMPLETIONS, {"prompt": self._words(), **self._open_ended(), **extra}

    def embeds(self) -> tuple[str, Body]:
        return COMPLETIONS, {"prompt_embeds": self._rows(), **self._open_ended()}

    def mixed(self) -> tuple[str, Body]:
        parts = [
            {"type": "token_ids", "token_ids": self._ids(high=20)},
            {"type": "prompt_embeds", "data": self._rows(20)},
            {"type": "text", "text": self._words()},
        ]
        self._rng.shuffle(parts)
        return COMPLETIONS, {"prompt": parts, **self._open_ended()}

    def _messages(self) -> list[Body]:
        return [{"role": "user", "content": self._words()}]

    def chat(self) -> tuple[str, Body]:
        messages = self._messages()
        if self._rng.random() < 0.3:
            part = {"type": "prompt_embeds", "data": self._rows(20)}
            messages[0]["content"] = [{"type": "text", "text": self._words()}, part]
        return CHAT, {"messages": messages, **self._open_ended()}

    def tools(self) -> tuple[str, Body]:
        choice = self._rng.choice(["auto", "required"])
        return CHAT, {"messages": self._messages(), "tools": [TOOL], "tool_choice": choice, "max_tokens": 60}

    def grammar(self) -> tuple[str, Body]:
        wanted: Body
        if self._rng.random() < 0.5:
            wanted = {"structured_outputs": {"regex": self._rng.choice(["[a-z]{3}", "(oak|elm)+"])}}
        else:
            wanted = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}
        return CHAT, {"messages": self._messages(), "max_tokens": 60, **wanted}

    def responses(self) -> tuple[str, Body]:
        return RESPONSES, {"input": self._words(), "max_output_tokens": self._tokens(), "store": False}
