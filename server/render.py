"""POST /v1/completions/render and /v1/chat/completions/render: what a request's prompt becomes. The request is checked
as if it were sent, and nothing is generated. For clients that embed or route a prompt before they send it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from server.answer import sampling_params
from server.answer_grammar import answer_grammar
from server.chat import chat_prompt, chat_prompt_text, parse_chat
from server.completions import parse_completion
from server.inputs import Prompt, completion_prompts
from server.openapi import json_body
from server.request_body import read_request
from server.respond import run_handler
from server.schemas import ChatRequest, CompletionRequest
from server.services import Services, services_of
from server.structured_outputs import constraint_of
from server.tools.requested import parts_rules, requested_tools

router = APIRouter()

_INLINE_TOKENS = 2048


@router.post("/v1/completions/render", openapi_extra=json_body(CompletionRequest, tensors=True))
async def render_completion(request: Request) -> Response:
    """A list, one object a prompt."""
    body = await read_request(request)
    return await run_handler(request, _completion(body, services_of(request)))


@router.post("/v1/chat/completions/render", openapi_extra=json_body(ChatRequest, tensors=True))
async def render_chat(request: Request) -> Response:
    """One object."""
    body = await read_request(request)
    return await run_handler(request, _chat(body, services_of(request)))


async def _completion(body: Mapping[str, Any], services: Services) -> Response:
    request = parse_completion(body, services)
    constraint = constraint_of(body)
    model = services.model_name(request.model)
    prompts = await completion_prompts(request, services)
    await services.grammars.compile(constraint, len(prompts))
    await sampling_params(request, prompts, services)

    def encode() -> bytes:
        return msgspec.json.encode([_rendered(model, each, _text(each, services), services) for each in prompts])

    # In a thread where there is much to decode: a microsecond a token.
    is_short = sum(map(len, prompts)) <= _INLINE_TOKENS
    return _json(encode() if is_short else await asyncio.to_thread(encode))


async def _chat(body: Mapping[str, Any], services: Services) -> Response:
    request = parse_chat(body, services)
    constraint = constraint_of(body)
    model = services.model_name(request.model)
    tools = requested_tools(request, services)
    embeddings = services.markers()
    text = await chat_prompt_text(request, services, tools, embeddings)
    prompt = await chat_prompt(text, embeddings, request, services)
    await answer_grammar(constraint, parts_rules(request, tools, text, services), services)
    await sampling_params(request, [prompt], services)
    return _json(msgspec.json.encode(_rendered(model, prompt, None if embeddings else text, services)))


def _text(prompt: Prompt, services: Services) -> str | None:
    if prompt.text is not None:
        return prompt.text
    if not prompt.token_ids:  # embeddings
        return None
    return services.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)


def _rendered(model: str, prompt: Prompt, text: str | None, services: Services) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": text,
        "token_ids": prompt.listed_ids(),
        "count": len(prompt),
        "max_model_len": services.model.max_model_len,
    }


def _json(data: bytes) -> Response:
    return Response(data, media_type="application/json")
