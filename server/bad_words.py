"""`bad_words` as token sequences: what the runner keeps out of an answer. Called by `answer`.

A word is banned as its tokens are at the beginning of a text and behind a space, which most tokenizers write
differently. That is all that a ban of tokens can promise: other token sequences may spell the same word.
"""

from __future__ import annotations

from collections.abc import Sequence

from server.errors import InvalidRequest
from server.tokenizer import Tokenizer

MAX_BAD_WORD_TOKENS = 1024
"""Of all words together, both spellings."""


async def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Raises InvalidRequest for words that have no tokens, or too many together."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        plain = tuple(await tokenizer.encode(word, add_special_tokens=False))
        if not plain:
            raise InvalidRequest("bad_words has a word that the tokenizer reads as nothing.", param="bad_words")
        found[plain] = None
        spaced = tuple(await tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        if spaced and spaced[-len(plain) :] != plain:  # else the ban of the plain one covers it
            found[spaced] = None
    if sum(map(len, found)) > MAX_BAD_WORD_TOKENS:
        raise InvalidRequest(f"bad_words have more than {MAX_BAD_WORD_TOKENS} tokens.", param="bad_words")
    return tuple(found)
