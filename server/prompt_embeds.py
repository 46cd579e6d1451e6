"""/v1/prompt_embeds: embeddings that are kept, for prompts to name: `{"type": "prompt_embeds", "id": "emb_…"}`.

They are in the runner's memory and gone when it ends. Each API key has its own: another one's don't exist for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from runner.messages import ModelInfo, StoredInfo
from server.arriving_file import ArrivingFile
from server.embeddings import EmbeddingError
from server.errors import InvalidRequest, UnsupportedParameter
from server.openapi import upload_body
from server.request_body import read_upload
from server.request_context import release_body
from server.respond import run_handler
from server.services import Services, services_of
from server.stored_embeddings import NoSuchEmbedding, StoredEmbeddings

router = APIRouter()

MAX_PAGE = 100
_DEFAULT_PAGE = 20


@router.post("/v1/prompt_embeds", openapi_extra=upload_body())
async def upload(request: Request) -> Response:
    """Keep one tensor file's rows. The same rows again are the same embedding, with its time anew."""
    services = services_of(request)
    _store(services)  # before a hundred megabytes are read
    # The body has no name here, so that `_keep` can let go of it.
    return await run_handler(request, _keep(*await read_upload(request), services))


@router.get("/v1/prompt_embeds")
async def list_embeddings(request: Request) -> Response:
    """One page, the newest first unless `order` is asc; the next one begins behind `after`."""
    services = services_of(request)
    query = request.query_params
    limit, order = _page_size(query.get("limit")), query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc.", param="order")
    after = query.get("after", "")
    if len(after) > 64:
        raise NoSuchEmbedding("after")
    entries, has_more = await _store(services).page(after, limit, newest_first=order == "desc")
    return _json(
        {
            "object": "list",
            "data": [_body(entry, services.model) for entry in entries],
            "first_id": entries[0].id if entries else None,
            "last_id": entries[-1].id if entries else None,
            "has_more": has_more,
        }
    )


@router.get("/v1/prompt_embeds/{embedding_id}")
async def get_embedding(embedding_id: str, request: Request) -> Response:
    services = services_of(request)
    found = await _store(services).find([embedding_id[:64]])
    if embedding_id not in found:
        raise NoSuchEmbedding("id")
    return _json(_body(found[embedding_id], services.model))


@router.delete("/v1/prompt_embeds/{embedding_id}")
async def delete_embedding(embedding_id: str, request: Request) -> Response:
    """Requests that use it go on; later ones don't find it any more."""
    await _store(services_of(request)).delete(embedding_id[:64])
    return _json({"id": embedding_id, "object": "prompt_embeds", "deleted": True})


async def _keep(body: Mapping[str, Any], file: ArrivingFile, services: Services) -> Response:
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise InvalidRequest("model must be a string.", param="model")
    services.model_name(model)
    try:
        rows = await file.rows(services.model.max_model_len)
    except EmbeddingError as error:
        raise InvalidRequest(f"The upload is refused: {error}.", param="file") from None
    digest = rows.sha256 or await asyncio.to_thread(_hex_digest, rows.data)
    entry = await _store(services).put(rows, digest)
    del file, rows
    release_body()
    return _json(_body(entry, services.model))


def _hex_digest(data: memoryview) -> str:
    return sha256(data).hexdigest()


def _store(services: Services) -> StoredEmbeddings:
    if services.stored is None:
        raise UnsupportedParameter("This server stores no embeddings.")
    return services.stored


def _page_size(text: str | None) -> int:
    if text is None:
        return _DEFAULT_PAGE
    if not text.isascii() or not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= MAX_PAGE:
        raise InvalidRequest(f"limit must be a whole number from 1 to {MAX_PAGE}.", param="limit")
    return int(text)


def _body(entry: StoredInfo, model: ModelInfo) -> dict[str, Any]:
    return {
        "id": entry.id,
        "object": "prompt_embeds",
        "rows": entry.rows,
        "hidden": model.hidden_size,
        "dtype": model.dtype,
        "sha256": entry.sha256,
        "created_at": entry.created_at,
        "expires_at": entry.expires_at,
    }


def _json(body: Mapping[str, Any]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
