"""The `input` of /v1/embeddings as prompts: texts, token ids, and parts (text, token ids, embeddings) in any mix.

Checked by hand, as `inputs` does: a list of a hundred thousand ids must cost one pass and give one error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from server.embeddings_schema import EmbeddingRequest
from server.errors import ContextLengthExceeded, InvalidRequest
from server.inputs import EncodedPart, Prompt, check_token_ids, decode_parts, encode_parts, encode_prompt, rows_at_least
from server.segments import MAX_IMAGES, MAX_PARTS, ImagePart, parse_parts
from server.services import Services
from server.truncation import Truncation

MAX_INPUTS = 2048
"""OpenAI's."""
MAX_TOTAL_ROWS = 1 << 20
"""Of one request."""


async def embedding_prompts(request: EmbeddingRequest, services: Services) -> list[Prompt]:
    """At least one, in the order of the request. Raises APIError."""
    inputs, is_batch = _as_inputs(request.input)
    if len(inputs) > MAX_INPUTS:
        raise InvalidRequest(f"input can have at most {MAX_INPUTS} items.", param="input")
    if sum(len(each) for each in inputs if _is_mixed(each)) > MAX_PARTS:
        raise InvalidRequest(f"A request can have at most {MAX_PARTS} parts.", param="input")
    truncation = _truncation(request, services.model.max_model_len)
    # The cheap ones first, as for completions: nothing is decoded before all else is found good.
    begun: list[Prompt | list[EncodedPart]] = []
    total = images = 0
    for index, each in enumerate(inputs):
        where = f"input[{index}]" if is_batch else "input"
        prompt = await _begin(each, where, request, services, truncation)
        total += _least_rows(prompt, services)
        images += 0 if isinstance(prompt, Prompt) else sum(isinstance(part, ImagePart) for part in prompt)
        if images > MAX_IMAGES:
            raise InvalidRequest(f"input can have at most {MAX_IMAGES} images in all.", param="input")
        if total > MAX_TOTAL_ROWS:
            raise InvalidRequest(f"input can have at most {MAX_TOTAL_ROWS} tokens in all.", param="input")
        begun.append(prompt)
        await asyncio.sleep(0)  # a short text takes a millisecond or two, and there may be thousands
    return [each if isinstance(each, Prompt) else await decode_parts(each, services, param="input") for each in begun]


def _as_inputs(value: Any) -> tuple[Sequence[str | list[Any]], bool]:
    """The input as a list of inputs, and whether it came as one."""
    if isinstance(value, str):
        return [value], False
    if isinstance(value, list) and value:
        # More than there can be inputs are not looked at before they are counted: there may be millions.
        kinds = {type(value[0])} if len(value) > MAX_INPUTS else set(map(type, value))
        if kinds == {int} or isinstance(value[0], dict):  # type(True) is bool
            return [value], False
        if kinds <= {str, list}:
            return value, True
    raise InvalidRequest(
        "input must be a string, a list of token ids, a list of parts or a list of such inputs, and not empty.",
        param="input",
    )


def _is_mixed(value: str | list[Any]) -> bool:
    return isinstance(value, list) and bool(value) and type(value[0]) is dict


def _truncation(request: EmbeddingRequest, max_model_len: int) -> Truncation | None:
    """Of texts the beginning is kept, as embedding models have it, unless the request says otherwise."""
    keep = request.truncate_prompt_tokens
    if keep is None:
        return None
    return Truncation(min(keep, max_model_len) if keep > 0 else max_model_len, request.truncation_side or "right")


async def _begin(
    value: str | list[Any], where: str, request: EmbeddingRequest, services: Services, truncation: Truncation | None
) -> Prompt | list[EncodedPart]:
    add_special = request.add_special_tokens is not False
    if _is_mixed(value):
        if truncation is not None:
            raise InvalidRequest(
                "truncate_prompt_tokens does not go with lists of parts.", param="truncate_prompt_tokens"
            )
        takes, sees = services.enable_prompt_embeds, services.vision is not None
        parts = parse_parts(value, where, take_embeddings=takes, take_images=sees)
        return await encode_parts(parts, services, add_special_tokens=add_special, param=where)
    if isinstance(value, str):
        token_ids = await encode_prompt(
            value, services, add_special_tokens=add_special, param=where, truncation=truncation
        )
    else:
        token_ids = value if truncation is None else truncation.of_ids(value)
    if not token_ids:
        raise InvalidRequest(f"{where} must have at least one token.", param=where)
    limit = services.model.max_model_len
    if len(token_ids) > limit:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limit} tokens. However, {where} has {len(token_ids)}. Please"
            " reduce its length, or set truncate_prompt_tokens.",
            param=where,
        )
    if not isinstance(value, str):  # two million are counted in no time, but not looked at
        check_token_ids(token_ids, services.model.vocab_size, where)
    return Prompt.from_token_ids(token_ids, where)


def _least_rows(prompt: Prompt | list[EncodedPart], services: Services) -> int:
    if isinstance(prompt, Prompt):
        return len(prompt)
    return sum(rows_at_least(part, services) for part in prompt)
