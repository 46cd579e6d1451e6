"""Text to token ids and back: what the routes ask of the model's tokenizer.

A thin wrapper around a fast tokenizer of `transformers`. Texts beyond a few kilobytes are encoded in two threads of its
own, which don't hold the interpreter's lock meanwhile, so that neither the event loop nor other requests' bodies wait.

Special tokens *inside* a text are encoded as what they are, as Hugging Face tokenizers do: a user who writes
`<|im_end|>` gets that token, in a chat message too.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from server.detokenizer import ByteDetokenizer, Detokenizer, StreamDetokenizer
from server.truncation import Truncation
from server.vocabulary import Vocabulary

# The library's own threads are for many texts at once: handing one over takes longer than a short one does.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_INLINE_CHARS = 4096
"""Texts up to this length are encoded in place: about 2 ms."""

_TAIL_TOKENS = 8
"""Prompt ids that a detokenizer starts from: more than a character's four bytes, few enough to cost nothing."""


class Tokenizer:
    """The tokenizer of one model. `transformers_tokenizer`: a fast one, not changed by anybody else afterwards."""

    def __init__(self, transformers_tokenizer: Any) -> None:
        self.transformers = transformers_tokenizer
        self._backend = transformers_tokenizer.backend_tokenizer
        # Some tokenizer files carry the padding and truncation of their training run.
        self._backend.no_padding()
        self._backend.no_truncation()
        self.vocabulary = Vocabulary(self._backend)
        self._longest_token = self._longest()
        self.opening_ids = self._opening()
        """The special tokens that go before a text. (Some tokenizers also put some behind it.)"""
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenizer")

    @classmethod
    def load(cls, folder: Path, *, trust_remote_code: bool = False) -> Tokenizer:
        """Raises ValueError when the folder has no fast tokenizer."""
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        if not hasattr(loaded, "backend_tokenizer"):
            raise ValueError("the model's tokenizer has no fast version (tokenizer.json)")
        return cls(loaded)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def as_json(self) -> str:
        """As tokenizer.json would have it, with what the model's other files add."""
        text: str = self._backend.to_str()
        return text

    @property
    def eos_token_id(self) -> int | None:
        eos = self.transformers.eos_token_id
        return eos if isinstance(eos, int) else None

    def is_longer_than(self, text: str, num_tokens: int) -> bool:
        """Whether `text` is certain to have more tokens than that, from its length alone: a hundred megabytes of text
        must not be tokenised to find that they do not fit."""
        return bool(self._longest_token) and len(text) > num_tokens * self._longest_token

    def _longest(self) -> int:
        """The most characters of a text that one token can stand for; 0 where that has no limit."""
        added = self._backend.get_added_tokens_decoder().values()
        if not self.vocabulary.is_exact or any(token.lstrip or token.rstrip for token in added):
            return 0  # unknown words and stripped white space may be of any length
        shrinks = 1 if self._backend.normalizer is None else 4  # composed characters; a mark for a space
        return shrinks * max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=0)

    def _opening(self) -> list[int]:
        encoding = self._backend.encode("a", add_special_tokens=False)
        own: list[int] = encoding.ids
        ids: list[int] = self._backend.post_process(encoding, add_special_tokens=True).ids
        starts = (k for k in range(len(ids) - len(own) + 1) if ids[k : k + len(own)] == own)
        return ids[: next(starts, 0)]

    async def encode(self, text: str, *, add_special_tokens: bool, truncation: Truncation | None = None) -> list[int]:
        """`text` without lone surrogates (JSON bodies have none)."""
        if len(text) <= _INLINE_CHARS:
            return self._encode(text, add_special_tokens, truncation)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._encode, text, add_special_tokens, truncation)

    def _encode(self, text: str, add_special_tokens: bool, truncation: Truncation | None) -> list[int]:
        if truncation is None:
            ids: list[int] = self._encoding(text, add_special_tokens).ids
            return ids
        # As the library truncates: the text gives way, the special tokens around it stay.
        encoding = self._encoding(text, False)
        special = self._backend.num_special_tokens_to_add(False) if add_special_tokens else 0
        encoding.truncate(max(truncation.keep - special, 0), direction=truncation.side)
        ids = self._backend.post_process(encoding, add_special_tokens=add_special_tokens).ids
        return truncation.of_ids(ids)

    def _encoding(self, text: str, add_special_tokens: bool) -> Any:
        """Without offsets. A text alone would hold the interpreter's lock until all of it is encoded, for a second a
        megabyte; as a batch it does not."""
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of a whole sequence, as a client would have it from the stream."""
        detokenizer = self.detokenizer((), at_start=True, skip_special_tokens=skip_special_tokens)
        return "".join([*map(detokenizer.push, token_ids), detokenizer.flush()])

    def names(self, token_ids: Sequence[int]) -> list[str]:
        """The tokens as the vocabulary spells them."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def special_ids(self, names: Iterable[str]) -> dict[str, int]:
        """Those of `names` that are special tokens, with their ids."""
        ids = ((name, self._backend.token_to_id(name)) for name in names)
        return {name: token_id for name, token_id in ids if self.vocabulary.is_special(token_id)}

    def detokenizer(
        self,
        prompt_ids: Sequence[int],
        *,
        at_start: bool = False,
        skip_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> Detokenizer:
        """For the tokens behind `prompt_ids` (no embedding rows among its last eight). `shown`: special tokens that are
        not skipped."""
        tail = [int(token_id) for token_id in prompt_ids[-_TAIL_TOKENS:]]
        if self.vocabulary.is_exact:
            return ByteDetokenizer(
                self.vocabulary, prompt_tail=tail, at_start=at_start, skip_special=skip_special_tokens, shown=shown
            )
        return StreamDetokenizer(self._backend, prompt_tail=tail, skip_special=skip_special_tokens, shown=shown)
