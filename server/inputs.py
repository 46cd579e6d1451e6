"""The prompts of a completion request: text, token ids and embeddings, in whatever form the client sent them, as rows.

Prompts are checked by hand: a list of a hundred thousand ids must cost one pass and give one error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from server.embeddings import EmbeddingError, decode_base64_embedding
from server.errors import APIError, ContextLengthExceeded, InvalidRequest
from server.file_tensor import TooManyRows
from server.prompt import PromptRows
from server.schemas import CompletionRequest
from server.services import Services
from server.truncation import Truncation

MAX_PROMPTS = 1024
MAX_CHOICES = 4096


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, and what of it a detokenizer and an echo need."""

    rows: PromptRows
    param: str
    """The field that it came in."""
    token_ids: Sequence[int] = ()
    """Empty for embeddings."""
    text: str | None = None
    """As the client sent it, if it did send text."""

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def from_token_ids(cls, token_ids: Sequence[int], param: str, text: str | None = None) -> Prompt:
        return cls(PromptRows.from_token_ids(token_ids), param, token_ids, text)


async def completion_prompts(request: CompletionRequest, services: Services) -> list[Prompt]:
    """Embeddings' prompts first, then the others, each in the order of the request. At least one.

    Raises APIError.
    """
    embeddings = _as_embeddings(request.prompt_embeds)
    # Clients that only have embeddings still send a prompt, since OpenAI's requires one: an empty one.
    texts_or_ids = [] if embeddings and request.prompt in ("", []) else _as_prompts(request.prompt)
    count = len(embeddings) + len(texts_or_ids)
    if not count:
        raise InvalidRequest("A request needs a prompt or prompt_embeds.", param="prompt")
    if count > MAX_PROMPTS:
        raise InvalidRequest(f"A request can have at most {MAX_PROMPTS} prompts.", param="prompt")
    if count * request.num_made > MAX_CHOICES:
        param = "best_of" if request.best_of else "n"
        raise InvalidRequest(f"A request can have at most {MAX_CHOICES} choices (prompts times {param}).", param=param)
    if embeddings and not services.enable_prompt_embeds:
        raise InvalidRequest("This server takes no prompt_embeds.", param="prompt_embeds")
    if embeddings and request.echo:
        raise InvalidRequest("echo is not possible with prompt_embeds: they have no text.", param="echo")
    truncation = Truncation.of(request, services.model.max_model_len)
    if embeddings and truncation is not None:
        raise InvalidRequest("truncate_prompt_tokens does not go with prompt_embeds.", param="truncate_prompt_tokens")
    # The cheap ones first: a bad id must not cost the decoding of sixty megabytes.
    add_special = request.add_special_tokens is not False
    rest = [await _from_text_or_ids(each, services, add_special, truncation) for each in texts_or_ids]
    return [await _from_embedding(each, services) for each in embeddings] + rest


def _as_embeddings(value: Any) -> list[str]:
    embeddings = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(embeddings, list) or not all(isinstance(each, str) for each in embeddings):
        raise InvalidRequest("prompt_embeds must be a base64 string or a list of them.", param="prompt_embeds")
    return embeddings


def _as_prompts(value: Any) -> list[str] | list[list[int]]:
    """The prompt as a list of prompts, all of one kind."""
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        kinds = set(map(type, value))
        if not kinds:
            raise InvalidRequest("prompt must not be an empty list.", param="prompt")
        if kinds == {int}:  # type(True) is bool
            return [value]
        if kinds in ({str}, {list}):
            return value
    raise InvalidRequest(
        "prompt must be a string, a list of strings, a list of token ids or a list of lists of token ids.",
        param="prompt",
    )


async def _from_text_or_ids(
    value: str | list[int], services: Services, add_special: bool, truncation: Truncation | None
) -> Prompt:
    if isinstance(value, str):
        token_ids = await encode_prompt(
            value, services, add_special_tokens=add_special, param="prompt", truncation=truncation
        )
        # Of a text that may have been cut, an echo shows what is left.
        text = value if truncation is None else None
    else:
        check_token_ids(value, services.model.vocab_size, "prompt")
        token_ids, text = value if truncation is None else truncation.of_ids(value), None
    if not token_ids:
        raise InvalidRequest("prompt must have at least one token.", param="prompt")
    return Prompt.from_token_ids(token_ids, "prompt", text)


async def encode_prompt(
    text: str, services: Services, *, add_special_tokens: bool, param: str, truncation: Truncation | None = None
) -> list[int]:
    """Raises ContextLengthExceeded for a text that need not be tokenised to see that it is too long, one that would be
    truncated included: a hundred megabytes must not be tokenised for a few words of them."""
    limit = services.model.max_model_len
    if services.tokenizer.is_longer_than(text, limit):
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limit} tokens. However, your {param} has {len(text)} characters,"
            f" which is more. Please reduce the length of the {param}.",
            param=param,
        )
    return await services.tokenizer.encode(text, add_special_tokens=add_special_tokens, truncation=truncation)


def check_token_ids(value: list[Any], vocab_size: int, param: str) -> None:
    """Raises InvalidRequest unless `value` is a list of ids of the vocabulary."""
    if value and (set(map(type, value)) != {int} or min(value) < 0 or max(value) >= vocab_size):
        raise InvalidRequest(f"{param} must have integers from 0 to {vocab_size - 1} as token ids.", param=param)


async def _from_embedding(text: str, services: Services) -> Prompt:
    model = services.model
    try:
        rows = await asyncio.to_thread(
            decode_base64_embedding,
            text,
            hidden_size=model.hidden_size,
            dtype=model.dtype,
            max_rows=model.max_model_len,
        )
    except TooManyRows as error:
        raise ContextLengthExceeded(f"prompt_embeds: {error}.", param="prompt_embeds") from None
    except EmbeddingError as error:
        raise _embedding_refused(str(error)) from None
    return Prompt(PromptRows.from_embedding(rows), "prompt_embeds")


def _embedding_refused(message: str) -> APIError:
    return InvalidRequest(f"prompt_embeds: {message}.", param="prompt_embeds")
