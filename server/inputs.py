"""The prompts of a completion request: text, token ids and embeddings, each alone or mixed, as rows. Chat has its mixed
prompts made here, too.

Prompts are checked by hand: a list of a hundred thousand ids must cost one pass and give one error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from runner.messages import EMBEDDING_ID
from server.arriving_json import ArrivingString
from server.embeddings import EmbeddingError, Rows, decode_base64_embedding
from server.errors import ContextLengthExceeded, InvalidRequest, UnsupportedParameter
from server.file_tensor import TooManyRows
from server.image_parts import laid_out, with_neighbours, without_neighbours
from server.prompt import PromptRows, Segment, StoredRows
from server.schemas import CompletionRequest
from server.segments import (
    MAX_IMAGES,
    MAX_PARTS,
    Attachment,
    EmbeddingPart,
    Hints,
    IdsPart,
    ImagePart,
    Part,
    SoftPromptPart,
    parse_parts,
)
from server.services import Services
from server.stored_parts import find_stored
from server.truncation import Truncation
from server.vision import PreparedImage

MAX_PROMPTS = 1024
MAX_CHOICES = 4096
_TURN_PROMPTS = 4
"""Looked at without giving the event loop a turn, where they are token ids."""

_AnyRows = TypeVar("_AnyRows", Rows, StoredRows)

ListedIds = Sequence[int | None] | None
"""A prompt's ids as clients see them: null at embedding rows, null altogether where there is nothing else."""

EncodedPart = list[int] | EmbeddingPart | ImagePart | Rows | StoredRows
"""A part of a mixed prompt whose embeddings and images are still to be decoded."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, and what of it a detokenizer and an echo need."""

    rows: PromptRows
    param: str
    """The field that it came in."""
    token_ids: Sequence[int] = ()
    """Empty where any row of the client's is an embedding."""
    text: str | None = None
    """As the client sent it, if it did send text."""
    soft_rows: int = 0
    """The first so many rows are those of the soft prompt that the request's `model` names."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def tail_ids(self) -> Sequence[int]:
        """The token ids behind the last embedding row: what a detokenizer can begin with."""
        return self.rows.tail_ids.tolist() if self.rows.spans else self.token_ids

    def listed_ids(self) -> ListedIds:
        if not self.rows.spans:
            return self.token_ids
        listed = [None if token_id == EMBEDDING_ID else token_id for token_id in self.rows.token_ids.tolist()]
        return listed if any(token_id is not None for token_id in listed) else None

    @classmethod
    def from_token_ids(cls, token_ids: Sequence[int], param: str, text: str | None = None) -> Prompt:
        return cls(PromptRows.from_token_ids(token_ids), param, token_ids, text)

    def behind(self, soft: Rows | None) -> Prompt:
        """With a soft prompt before it, if there is one."""
        return self if soft is None else replace(self, rows=self.rows.behind(soft), soft_rows=soft.num_rows)


async def completion_prompts(request: CompletionRequest, services: Services) -> list[Prompt]:
    """Embeddings' prompts first, then the others, each in the order of the request. At least one.

    Raises APIError.
    """
    embeddings = _as_embeddings(request.prompt_embeds)
    # Clients that only have embeddings still send a prompt, since OpenAI's requires one: an empty one.
    texts_or_ids: Sequence[str | list[Any]] = (
        [] if embeddings and request.prompt in ("", []) else _as_prompts(request.prompt)
    )
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
    is_batch = texts_or_ids is request.prompt
    mixed = _mixed_prompts(texts_or_ids, services, is_batch=is_batch)
    is_rows = EmbeddingPart | ImagePart | SoftPromptPart
    has_rows = bool(embeddings) or any(isinstance(part, is_rows) for parts in mixed.values() for part in parts)
    soft = services.soft_rows(request.model)
    if has_rows and request.echo:
        raise InvalidRequest("echo is not possible with prompt_embeds or images: they have no text.", param="echo")
    truncation = Truncation.of(request, services.model.max_model_len - (0 if soft is None else soft.num_rows))
    if (has_rows or mixed) and truncation is not None:
        raise InvalidRequest(
            "truncate_prompt_tokens does not go with prompt_embeds or lists of parts.", param="truncate_prompt_tokens"
        )
    # The cheap ones first: a bad id must not cost the decoding of sixty megabytes.
    add_special = request.add_special_tokens is not False
    rest: list[Prompt | list[EncodedPart]] = []
    for index, each in enumerate(texts_or_ids):
        if index in mixed:
            rest.append(await encode_parts(mixed[index], services, add_special_tokens=add_special, param="prompt"))
        else:
            rest.append(await _from_text_or_ids(each, services, add_special, truncation))
        if index % _TURN_PROMPTS == _TURN_PROMPTS - 1:
            await asyncio.sleep(0)  # a thousand lists of as many ids take 60 ms
    prompts = [await _from_embedding(each, services) for each in embeddings] + [
        each if isinstance(each, Prompt) else await decode_parts(each, services, param="prompt") for each in rest
    ]
    return [prompt.behind(soft) for prompt in prompts]


def _as_embeddings(value: Any) -> list[str]:
    embeddings = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(embeddings, list) or not all(isinstance(each, str) for each in embeddings):
        raise InvalidRequest("prompt_embeds must be a base64 string or a list of them.", param="prompt_embeds")
    return embeddings


def _as_prompts(value: Any) -> list[str] | list[list[Any]]:
    """The prompt as a list of prompts: all of them texts, or each a list of token ids or of parts."""
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        if not value:
            raise InvalidRequest("prompt must not be an empty list.", param="prompt")
        # More than there can be prompts are not looked at before they are counted: there may be millions.
        kinds = {type(value[0])} if len(value) > MAX_PROMPTS else set(map(type, value))
        if kinds == {int} or isinstance(value[0], dict):  # type(True) is bool
            return [value]
        if kinds in ({str}, {list}):
            return value
    raise InvalidRequest(
        "prompt must be a string, a list of strings, a list of token ids, a list of parts or a list of such lists.",
        param="prompt",
    )


def _mixed_prompts(prompts: Sequence[str | list[Any]], services: Services, *, is_batch: bool) -> dict[int, list[Part]]:
    """The parts of those prompts that are lists of parts, by their index. Raises InvalidRequest."""
    mixed = {
        index: each for index, each in enumerate(prompts) if isinstance(each, list) and each and type(each[0]) is dict
    }
    if sum(map(len, mixed.values())) > MAX_PARTS:
        raise InvalidRequest(f"A request can have at most {MAX_PARTS} parts.", param="prompt")
    take, sees = services.enable_prompt_embeds, services.vision is not None
    parsed = {
        index: parse_parts(each, f"prompt[{index}]" if is_batch else "prompt", take_embeddings=take, take_images=sees)
        for index, each in mixed.items()
    }
    if sum(isinstance(part, ImagePart) for parts in parsed.values() for part in parts) > MAX_IMAGES:
        raise InvalidRequest(f"A request can have at most {MAX_IMAGES} images.", param="prompt")
    return parsed


async def encode_parts(
    parts: Sequence[Part], services: Services, *, add_special_tokens: bool, param: str
) -> list[EncodedPart]:
    """The parts of one prompt with their texts as token ids, each tokenised on its own; `add_special_tokens`: those
    that go before a text, if the prompt begins with one. No embedding is decoded. Raises APIError."""
    encoded: list[EncodedPart] = []
    least_rows = 0
    stored = await find_stored(parts, services.stored)
    if services.vision is not None:
        parts = laid_out(parts, services.vision.layout)
    for part in parts:
        if isinstance(part, EmbeddingPart) and part.stored:
            _check_hints(part.hints, services)
            encoded.append(_with_hints(stored[part.stored], part.hints))
            least_rows += stored[part.stored].num_rows
            continue
        if isinstance(part, EmbeddingPart | ImagePart):
            if isinstance(part, EmbeddingPart):
                _check_hints(part.hints, services)
            encoded.append(part)
            least_rows += rows_at_least(part, services)
            continue
        if isinstance(part, SoftPromptPart):
            rows = services.soft_prompts.get(part.name, part.where)
            encoded.append(rows)
            least_rows += rows.num_rows
            continue
        if isinstance(part, IdsPart):
            check_token_ids(part.token_ids, services.model.vocab_size, part.where)
            token_ids = part.token_ids
        else:
            # A text that is the whole prompt is no different from a plain one.
            around = add_special_tokens and len(parts) == 1
            piece = with_neighbours(part)
            token_ids = await encode_prompt(piece, services, add_special_tokens=around, param=part.where)
            token_ids = without_neighbours(token_ids, part)
            if add_special_tokens and not around and part is parts[0]:
                token_ids = services.tokenizer.opening_ids + token_ids
            await asyncio.sleep(0)  # a short text takes a millisecond or two, and there may be thousands
        encoded.append(token_ids)
        least_rows += len(token_ids)
        if least_rows > services.model.max_model_len:
            break  # what comes behind need not be tokenised to see that it does not fit
    if not least_rows:
        raise InvalidRequest(f"{param} must have at least one token.", param=param)
    _check_rows(least_rows, services, param)
    return encoded


async def decode_parts(parts: Sequence[EncodedPart], services: Services, *, param: str) -> Prompt:
    """The prompt that `encode_parts` has begun. Raises APIError."""
    # Each embedding part has one row at least, which a later one must not be decoded to learn.
    num_rows = sum(rows_at_least(part, services) for part in parts)
    segments: list[Segment] = []
    for part in parts:
        if isinstance(part, ImagePart):
            least = rows_at_least(part, services)
            image = await _load_image(part, services, services.model.max_model_len - num_rows + least)
            num_rows += image.num_rows - least
            segments.append(image)
        elif isinstance(part, EmbeddingPart):
            rows = await _decode(part.data, services, services.model.max_model_len - num_rows + 1, part.where)
            num_rows += rows.num_rows - 1
            segments.append(_with_hints(rows, part.hints))
        else:
            segments.append(part)
    prompt_rows = PromptRows.from_segments(segments)
    token_ids = () if prompt_rows.spans else prompt_rows.token_ids.tolist()
    return Prompt(prompt_rows, param, token_ids)


def rows_at_least(part: EncodedPart, services: Services) -> int:
    """Of an embedding or an image, which are not decoded yet, as much as is known."""
    if isinstance(part, Rows | StoredRows):
        return part.num_rows
    if isinstance(part, list):
        return len(part)
    return services.vision.least_rows if isinstance(part, ImagePart) and services.vision is not None else 1


async def _load_image(part: ImagePart, services: Services, max_rows: int) -> PreparedImage:
    if services.vision is None:
        raise UnsupportedParameter(f"{part.where}: this model takes no images.", param=part.where)
    return await services.vision.load_image(part, max_rows)


def _check_hints(hints: Hints | None, services: Services) -> None:
    """Raises InvalidRequest for ids that are none. How many there must be is known only with the rows."""
    if hints is not None:
        check_token_ids([each for each in hints.token_ids if each is not None], services.model.vocab_size, hints.where)


def _with_hints(rows: _AnyRows, hints: Hints | None) -> _AnyRows:
    """Raises InvalidRequest."""
    if hints is None:
        return rows
    if len(hints.token_ids) != rows.num_rows:
        raise InvalidRequest(
            f"{hints.where} must have a token id or null for each of the {rows.num_rows} rows; it has"
            f" {len(hints.token_ids)} items.",
            param=hints.where,
        )
    ids = [EMBEDDING_ID if each is None else each for each in hints.token_ids]
    return replace(rows, hint_ids=np.array(ids, dtype=np.int32))


def _check_rows(num_rows: int, services: Services, param: str) -> None:
    limit = services.model.max_model_len
    if num_rows > limit:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limit} tokens. However, your {param} has at least {num_rows}."
            f" Please reduce the length of the {param}.",
            param=param,
        )


async def _from_text_or_ids(
    value: str | list[int], services: Services, add_special: bool, truncation: Truncation | None
) -> Prompt:
    if isinstance(value, str):
        token_ids = await encode_prompt(
            value, services, add_special_tokens=add_special, param="prompt", truncation=truncation
        )
        await asyncio.sleep(0)  # as in `encode_parts`
        # Of a text that may have been cut, an echo shows what is left.
        text = value if truncation is None else None
    else:
        if truncation is None:
            _check_rows(len(value), services, "prompt")  # two million are counted in no time, but not looked at
        token_ids, text = value if truncation is None else truncation.of_ids(value), None
        check_token_ids(token_ids, services.model.vocab_size, "prompt")
    if not token_ids:
        raise InvalidRequest("prompt must have at least one token.", param="prompt")
    return Prompt.from_token_ids(token_ids, "prompt", text)


async def encode_prompt(
    text: str, services: Services, *, add_special_tokens: bool, param: str, truncation: Truncation | None = None
) -> list[int]:
    """Raises ContextLengthExceeded as `check_length` does, for a text that would be truncated, too."""
    check_length(text, services, param)
    return await services.tokenizer.encode(text, add_special_tokens=add_special_tokens, truncation=truncation)


def check_length(text: str, services: Services, param: str, *, spare_chars: int = 0) -> None:
    """Raises ContextLengthExceeded for a text that need not be tokenised to see that it is too long: a hundred
    megabytes must not be tokenised for a few words of them. `spare_chars`: so many of it are not going to be text."""
    limit = services.model.max_model_len
    if services.tokenizer.is_longer_than(text, limit + spare_chars):  # a token has one character at least
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limit} tokens. However, your {param} has {len(text)} characters,"
            f" which is more. Please reduce the length of the {param}.",
            param=param,
        )


def check_token_ids(value: list[Any], vocab_size: int, param: str) -> None:
    """Raises InvalidRequest unless `value` is a list of ids of the vocabulary."""
    if value and (set(map(type, value)) != {int} or min(value) < 0 or max(value) >= vocab_size):
        raise InvalidRequest(f"{param} must have integers from 0 to {vocab_size - 1} as token ids.", param=param)


async def _from_embedding(text: str, services: Services) -> Prompt:
    rows = await _decode(text, services, services.model.max_model_len, "prompt_embeds")
    return Prompt(PromptRows.from_embedding(rows), "prompt_embeds")


async def _decode(data: str | Attachment, services: Services, max_rows: int, where: str) -> Rows:
    """Raises InvalidRequest, or ContextLengthExceeded for more than `max_rows`."""
    model = services.model
    try:
        if isinstance(data, Attachment | ArrivingString):
            return await data.file.rows(max_rows)
        return await asyncio.to_thread(
            decode_base64_embedding,
            data,
            hidden_size=model.hidden_size,
            dtype=model.dtype,
            max_rows=max_rows,
        )
    except TooManyRows as error:
        raise ContextLengthExceeded(f"{where}: {error}.", param=where) from None
    except EmbeddingError as error:
        raise InvalidRequest(f"{where}: {error}.", param=where) from None
