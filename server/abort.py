"""POST /abort: end an answer that is being made, besides hanging up on it. For whoever has its id but not its
connection: a gateway, or another process of the client's."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from server.body import read_json
from server.errors import APIError
from server.openapi import json_body
from server.schemas import AbortRequest, parse
from server.services import services_of

router = APIRouter(tags=["operation"])


@router.post("/abort", openapi_extra=json_body(AbortRequest))
async def abort(request: Request) -> Response:
    """End an answer that is being made, by its `id`. Its client is told with an error."""
    wanted = parse(AbortRequest, await read_json(request))
    if not await services_of(request).engine.abort_answer(wanted.id):
        raise APIError(404, "No answer of yours with this id is being made.", param="id", code="not_found")
    return Response(msgspec.json.encode({"id": wanted.id, "aborted": True}), media_type="application/json")
