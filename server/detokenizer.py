"""Tokens to text, one token at a time. One `Detokenizer` a choice; fed by `choices`.

No piece of text ever ends in half a character: bytes that may still become one are kept until they do, and turn into
U+FFFD only when the next byte rules it out or generation ends (`flush`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from encodings.utf_8 import IncrementalDecoder
from typing import Protocol

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

from server.vocabulary import Vocabulary


class Detokenizer(Protocol):
    """The text of a growing token sequence."""

    def push(self, token_id: int) -> str:
        """The text that this token completes."""

    def flush(self) -> str:
        """What is left when no more tokens come."""

    @property
    def texts(self) -> Mapping[int, str | None] | None:
        """By token: what `push` would return now, without having been pushed. Those that are missing or None must be
        pushed; None: all of them, because something is held back."""


class ByteDetokenizer:
    """For tokenizers whose tokens are bytes: a UTF-8 decoder with a table in front."""

    __slots__ = ("_shown", "_skip_special", "_strip", "_utf8", "_vocabulary")

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        prompt_tail: Iterable[int] = (),
        at_start: bool = False,
        skip_special: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """`prompt_tail`: the ids before the first token pushed; they may end in half a character.
        `at_start`: the first token pushed is the first of its text. `shown`: special tokens that are not skipped."""
        self._vocabulary = vocabulary
        self._skip_special = skip_special
        self._shown = shown
        self._strip = at_start and vocabulary.strips_first_space
        self._utf8 = IncrementalDecoder("replace")
        for token_id in prompt_tail:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        text = self._vocabulary.text_of(token_id)
        if text is not None and not self._utf8.buffer and not self._strip:
            return text
        if self._vocabulary.is_special(token_id):
            # Whatever was incomplete before a special token stays so.
            skip = self._skip_special and token_id not in self._shown
            return self.flush() + ("" if skip else self._vocabulary.bytes_of(token_id).decode())
        text = self._utf8.decode(self._vocabulary.bytes_of(token_id))
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)

    @property
    def texts(self) -> Mapping[int, str | None] | None:
        return None if self._utf8.buffer or self._strip else self._vocabulary.texts


class StreamDetokenizer:
    """For every other tokenizer: the library's own incremental decoding."""

    __slots__ = ("_backend", "_pending", "_shown", "_skip_special", "_stream")

    def __init__(
        self,
        backend: Backend,
        *,
        prompt_tail: Sequence[int] = (),
        skip_special: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._backend = backend
        self._skip_special = skip_special
        self._shown = shown if skip_special else frozenset()
        self._stream = DecodeStream(ids=list(prompt_tail), skip_special_tokens=skip_special)
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        if token_id in self._shown:
            return self.flush() + (self._backend.id_to_token(token_id) or "")
        self._pending.append(token_id)
        try:
            piece: str | None = self._stream.step(self._backend, token_id)
        except Exception:
            # Some decoders change earlier text when a token is added; the library then gives up on its window.
            self._stream = DecodeStream(skip_special_tokens=self._skip_special)
            return self.flush()
        if not piece:
            return ""
        self._pending.clear()
        return piece

    def flush(self) -> str:
        rest: str = self._backend.decode(self._pending, skip_special_tokens=self._skip_special)
        self._pending.clear()
        return rest

    @property
    def texts(self) -> Mapping[int, str | None] | None:
        return None
