"""POST /tokenize and /detokenize, GET /tokenizer_info (also under /v1): the model's tokenizer, as evaluation harnesses
ask for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from server.body import read_json
from server.chat import chat_prompt_ids
from server.errors import InvalidRequest
from server.inputs import check_token_ids, encode_prompt
from server.openapi import json_body
from server.respond import run_handler
from server.schemas import DetokenizeRequest, TokenizeRequest, parse
from server.services import Services, services_of
from server.unsupported import refuse_unknown

router = APIRouter()


@router.post("/tokenize", openapi_extra=json_body(TokenizeRequest))
@router.post("/v1/tokenize", openapi_extra=json_body(TokenizeRequest))
async def tokenize(request: Request) -> Response:
    body = await read_json(request)
    return await run_handler(request, _tokenize(body, services_of(request)))


@router.post("/detokenize", openapi_extra=json_body(DetokenizeRequest))
@router.post("/v1/detokenize", openapi_extra=json_body(DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    body = await read_json(request)
    return _detokenize(body, services_of(request))


@router.get("/tokenizer_info")
@router.get("/v1/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    """What a harness needs in order to use this tokenizer from afar."""
    services = services_of(request)
    own = services.tokenizer.transformers
    return _json(
        {
            "tokenizer_class": type(own).__name__,
            "vocab_size": services.tokenizer.vocabulary.size,
            "model_max_length": services.model.max_model_len,
            "bos_token": own.bos_token,
            "eos_token": own.eos_token,
            "pad_token": own.pad_token,
            "unk_token": own.unk_token,
            "chat_template": services.chat_template.source,
        }
    )


async def _tokenize(body: Mapping[str, Any], services: Services) -> Response:
    request = parse(TokenizeRequest, body)
    if services.strict_params:
        refuse_unknown(body, TokenizeRequest, {})
    services.model_name(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("A request needs either a prompt or messages.", param="prompt")
    if request.prompt is None:
        token_ids = await chat_prompt_ids(request, services)
    else:
        add_special = request.add_special_tokens is not False
        token_ids = await encode_prompt(request.prompt, services, add_special_tokens=add_special, param="prompt")
    answer: dict[str, Any] = {
        "count": len(token_ids),
        "max_model_len": services.model.max_model_len,
        "tokens": token_ids,
    }
    if request.return_token_strs:
        answer["token_strs"] = services.tokenizer.names(token_ids)
    return _json(answer)


def _detokenize(body: Mapping[str, Any], services: Services) -> Response:
    request = parse(DetokenizeRequest, body)
    if services.strict_params:
        refuse_unknown(body, DetokenizeRequest, {})
    services.model_name(request.model)
    if not isinstance(request.tokens, list):
        raise InvalidRequest("tokens must be a list of token ids.", param="tokens")
    if len(request.tokens) > services.model.max_model_len:
        raise InvalidRequest(f"tokens must have at most {services.model.max_model_len} items.", param="tokens")
    check_token_ids(request.tokens, services.model.vocab_size, "tokens")
    return _json({"prompt": services.tokenizer.decode(request.tokens, skip_special_tokens=False)})


def _json(body: Mapping[str, Any]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
