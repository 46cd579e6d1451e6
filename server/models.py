"""GET /v1/models and /v1/models/{id}: what is served, and under which names; soft prompts as `base:NAME`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from server.services import Services, services_of

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    services = services_of(request)
    names = services.served_model_names
    soft = [f"{base}:{name}" for base in names for name in services.soft_prompts.rows]
    return {"object": "list", "data": [_card(name, services) for name in (*names, *soft)]}


@router.get("/v1/models/{model_id:path}")  # names may have slashes
async def retrieve_model(request: Request, model_id: str) -> dict[str, Any]:
    services = services_of(request)
    return _card(services.model_name(model_id), services)


def _card(name: str, services: Services) -> dict[str, Any]:
    is_soft = services.soft_rows(name) is not None
    return {
        "id": name,
        "object": "model",
        "created": services.created,
        "owned_by": "intarsia",
        "root": services.served_model_names[0],
        "parent": name.rpartition(":")[0] if is_soft else None,
        "max_model_len": services.model.max_model_len,
        "permission": [],
    }
