"""Log-probabilities in OpenAI's two shapes: parallel lists for completions, a list of objects for chat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from runner.messages import TokenLogprobs
from server.choices import TokenRecord
from server.vocabulary import Vocabulary

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


class LogprobFormat:
    """`as_token_ids`: write tokens as `token_id:123`, which no two ids share. `top`: how many of the most probable
    tokens a completion's positions show (None: all that there are; a prompt may have been scored for more)."""

    def __init__(self, vocabulary: Vocabulary, *, as_token_ids: bool = False, top: int | None = None) -> None:
        self._vocabulary = vocabulary
        self._top_count = top
        self._as_token_ids = as_token_ids

    def completion(self, records: Iterable[TokenRecord]) -> dict[str, list[Any]]:
        """A position without log-probabilities (the first of an echoed prompt) has null twice."""
        tokens: list[str] = []
        token_logprobs: list[float | None] = []
        top_logprobs: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for record in records:
            found = record.logprobs
            tokens.append(self._completion_name(record.token_id))
            offsets.append(record.offset)
            token_logprobs.append(None if found is None else _finite(found.logprob))
            top_logprobs.append(None if found is None else self._top(found))
        return {
            "tokens": tokens,
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": offsets,
        }

    def _top(self, found: TokenLogprobs) -> dict[str, float]:
        """The position's own token and the most probable ones. Of two ids with one text, the more probable."""
        top = {self._completion_name(found.token): _finite(found.logprob)}
        count = self._top_count
        for token, value in zip(found.top_tokens[:count], found.top_logprobs[:count], strict=True):
            name = self._completion_name(token)
            top[name] = max(top.get(name, LOWEST), _finite(value))
        return top

    def prompt(self, entries: Sequence[TokenLogprobs | None], top: int) -> list[dict[str, Any] | None]:
        """vLLM's shape: by token id, the `top` most probable tokens and the prompt's own. None where there is nothing
        to say: at the first position and at embedding rows."""
        return [None if found is None else self._ranked(found, top) for found in entries]

    def _ranked(self, found: TokenLogprobs, top: int) -> dict[str, Any]:
        best = zip(found.top_tokens[:top], found.top_logprobs[:top], range(1, top + 1), strict=False)
        rows = [*best, (found.token, found.logprob, found.rank)]
        return {
            str(token): {"logprob": _finite(value), "rank": rank, "decoded_token": self._completion_name(token)}
            for token, value, rank in rows
        }

    def chat(self, records: Sequence[TokenRecord]) -> dict[str, Any]:
        return {"content": [self._chat_entry(record) for record in records], "refusal": None}

    def _chat_entry(self, record: TokenRecord) -> dict[str, Any]:
        found = record.logprobs
        entry = self._named(record.token_id, LOWEST if found is None else found.logprob)
        top = () if found is None else zip(found.top_tokens, found.top_logprobs, strict=True)
        entry["top_logprobs"] = [self._named(token, value) for token, value in top]
        return entry

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._vocabulary.bytes_of(token_id)
        name = f"token_id:{token_id}" if self._as_token_ids else _text(raw) or _escaped(raw)
        return {"token": name, "logprob": _finite(logprob), "bytes": list(raw)}

    def _completion_name(self, token_id: int) -> str:
        """As OpenAI writes it: half a character is `bytes:\\xe2\\x80`."""
        if self._as_token_ids:
            return f"token_id:{token_id}"
        raw = self._vocabulary.bytes_of(token_id)
        text = _text(raw)
        return f"bytes:{_escaped(raw)}" if text is None else text


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST


def _text(raw: bytes) -> str | None:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def _escaped(raw: bytes) -> str:
    return "".join(f"\\x{value:02x}" for value in raw)
