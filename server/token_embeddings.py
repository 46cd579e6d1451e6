"""/v1/token_embeddings: the model's own input rows, so that clients who edit or mix them need no copy of the weights.

POST gives the rows of a text or of token ids, as `model.get_input_embeddings()(ids)` does: behind any scaling, in the
model's dtype, ready to be sent back as `prompt_embeds`. GET says what rows are like.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from server.body import read_json
from server.embeddings_schema import TokenEmbeddingsRequest
from server.errors import ContextLengthExceeded, InvalidRequest
from server.file_tensor import ITEM_BYTES
from server.inputs import check_token_ids, encode_prompt
from server.openapi import json_body
from server.respond import run_handler
from server.rows_out import MAX_ROW_BYTES, RowsOut, check_size
from server.schemas import parse
from server.services import Services, services_of
from server.unsupported import refuse_unknown

router = APIRouter()

RAW = "application/octet-stream"


@router.post("/v1/token_embeddings", openapi_extra=json_body(TokenEmbeddingsRequest, raw=RAW))
async def token_embeddings(request: Request) -> Response:
    raw = RAW in [each.partition(";")[0].strip().lower() for each in request.headers.get("accept", "").split(",")]
    body = await read_json(request)
    return await run_handler(request, _look_up(body, services_of(request), raw=raw))


@router.get("/v1/token_embeddings")
async def describe(request: Request) -> dict[str, Any]:
    services = services_of(request)
    model = services.model
    return {
        "object": "token_embeddings",
        "model": services.served_model_names[0],
        "hidden": model.hidden_size,
        "dtype": model.dtype,
        "scale": model.embedding_scale,
        "vocab_size": model.vocab_size,
        "max_rows": min(model.max_model_len, MAX_ROW_BYTES // _row_bytes(services)),
    }


async def _look_up(body: Mapping[str, Any], services: Services, *, raw: bool) -> Response:
    request = parse(TokenEmbeddingsRequest, body)
    if services.strict_params:
        refuse_unknown(body, TokenEmbeddingsRequest, {})
    name = services.model_name(request.model)
    token_ids = await _token_ids(request, services)
    nbytes = check_size(len(token_ids), _row_bytes(services), param="input", advice="Send it in parts.")
    services.answer_memory.reserve(nbytes)
    parts = await services.engine.token_rows(token_ids)
    rows = RowsOut("rows", parts, len(token_ids), services.model.hidden_size, services.model.dtype)
    if raw:
        return Response(await asyncio.to_thread(rows.file), media_type=RAW)

    def encode() -> bytes:
        return msgspec.json.encode({"object": "token_embeddings", "model": name, **rows.body(), "token_ids": token_ids})

    return Response(await asyncio.to_thread(encode), media_type="application/json")


async def _token_ids(request: TokenEmbeddingsRequest, services: Services) -> list[int]:
    """At least one and at most a context of them. Raises APIError."""
    value, limit = request.input, services.model.max_model_len
    if isinstance(value, str):
        add_special = request.add_special_tokens is not False
        token_ids = await encode_prompt(value, services, add_special_tokens=add_special, param="input")
    elif isinstance(value, list):
        token_ids = value
    else:
        raise InvalidRequest("input must be a string or a list of token ids.", param="input")
    if not token_ids:
        raise InvalidRequest("input must have at least one token.", param="input")
    if len(token_ids) > limit:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limit} tokens. However, your input has {len(token_ids)}.",
            param="input",
        )
    if not isinstance(value, str):
        check_token_ids(token_ids, services.model.vocab_size, "input")
    return token_ids


def _row_bytes(services: Services) -> int:
    return services.model.hidden_size * ITEM_BYTES[services.model.dtype]
