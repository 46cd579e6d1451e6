"""Token ids to bytes: what `detokenizer` and the log-probability formats are made of.

A token of a byte-level or byte-fallback tokenizer *is* a sequence of bytes, so text is the UTF-8 decoding of their
concatenation, and a token that is half a character has an exact value too. Which of the two a tokenizer is can be read
from its decoder. (The library's `DecodeStream` re-decodes a growing window at every step and cannot say what it holds
back when generation ends in the middle of a character.) Decoders of any other kind have no such bytes; for them
`is_exact` is false and a token stands for its decoded text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer as Backend

_WORD_MARK = "\u2581"
"""SentencePiece's space."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """The bytes of every token id. Ids unknown to the tokenizer (a padded embedding table has some) are empty."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.size = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        steps = list(_decoder_steps(backend))
        kinds = {step["type"] for step in steps}
        self._byte_level = kinds == {"ByteLevel"}
        self._word_marks = bool(kinds) and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
        self.is_exact = self._byte_level or self._word_marks
        self.strips_first_space = self._word_marks and any(_strips_first_space(step) for step in steps)
        """Whether a text's first token loses a leading space, because the tokenizer had put one before the text."""
        self._bytes: dict[int, bytes] = {}
        self.texts: dict[int, str | None] = {}
        """As far as `text_of` was asked for them."""

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def bytes_of(self, token_id: int) -> bytes:
        """The token's own bytes; for a special token, its name."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._compute(token_id)
        return known

    def text_of(self, token_id: int) -> str | None:
        """The token's text, if it is whole characters and not special: as most are."""
        try:
            return self.texts[token_id]
        except KeyError:
            pass
        try:
            text = None if self.is_special(token_id) else self.bytes_of(token_id).decode()
        except UnicodeDecodeError:
            text = None
        self.texts[token_id] = text
        return text

    def decode(self, token_ids: list[int], *, skip_special: bool) -> str:
        """The tokenizer's own decoding of a whole text. Unknown ids are empty."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special)
        return text

    def _compute(self, token_id: int) -> bytes:
        # Ids come from requests too, and the library takes unsigned 32-bit numbers only.
        name = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if name is None:
            return b""
        if token_id in self._special:
            return name.encode()
        if self._byte_level:
            # All or nothing, as the library's decoder: an added token such as "two words" is not in the alphabet.
            values = [_BYTE_OF_CHARACTER.get(character) for character in name]
            known = [value for value in values if value is not None]
            return bytes(known) if len(known) == len(values) else name.encode()
        if self._word_marks:
            single = _BYTE_TOKEN.fullmatch(name)
            return bytes([int(single[1], 16)]) if single else name.replace(_WORD_MARK, " ").encode()
        return self.decode([token_id], skip_special=False).encode()


def _decoder_steps(backend: Backend) -> Iterator[dict[str, Any]]:
    """The decoder's description, sequences unrolled. Nothing where there is no decoder."""
    if backend.decoder is None:
        return
    pending = [json.loads(backend.decoder.__getstate__())]
    while pending:
        step = pending.pop(0)
        if step["type"] == "Sequence":
            pending = step["decoders"] + pending
        else:
            yield step


def _strips_first_space(step: dict[str, Any]) -> bool:
    if step["type"] == "Strip":
        return bool(step.get("start", 0)) and step.get("content") == " "
    return bool(step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes, as every byte-level tokenizer has them."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(value): value for value in printable}
    others = (value for value in range(256) if value not in set(printable))
    alphabet.update({chr(256 + index): value for index, value in enumerate(others)})
    return alphabet


_BYTE_OF_CHARACTER = _byte_alphabet()
