"""POST /v1/completions: the older of OpenAI's two text endpoints, and the one for token ids and embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.answer import open_answer
from server.choices import Delta, TokenRecord
from server.inputs import ListedIds, completion_prompts
from server.logprobs import LogprobFormat
from server.openapi import json_body
from server.request_body import read_request
from server.request_context import release_body
from server.respond import Envelope, Json, WholeChoice, run_handler, streamed_response, whole_response
from server.schemas import CompletionRequest, check_generation, parse, without_input
from server.services import Services, services_of
from server.structured_outputs import constraint_of
from server.unsupported import COMPLETION, refuse_unknown, refuse_unsupported

router = APIRouter()


@router.post("/v1/completions", openapi_extra=json_body(CompletionRequest, streams=True, tensors=True))
async def completions(request: Request) -> Response:
    # The body has no name here, so that `_complete` can let go of it.
    return await run_handler(request, _complete(await read_request(request), services_of(request)))


async def _complete(body: Mapping[str, Any], services: Services) -> Response:
    request = parse_completion(body, services)
    constraint = constraint_of(body)
    envelope = Envelope.new("cmpl", services.model_name(request.model), services.system_fingerprint)
    prompts = await completion_prompts(request, services)
    # Embeddings may be a hundred megabytes as text and as rows, and an answer takes its time: neither is held for it.
    del body
    request = without_input(request)
    prompt_ids = [prompt.listed_ids() for prompt in prompts] if request.return_token_ids else []
    form = CompletionFormat(request, prompt_ids, services)
    grammar = await services.grammars.compile(constraint, len(prompts))
    del constraint
    answer = await open_answer(request, prompts, services, envelope.id, grammar=grammar)
    del prompts
    release_body()
    if request.stream:
        return streamed_response(answer, form, envelope, request.stream_options)
    return await whole_response(answer, form, envelope, request.n or 1)


def parse_completion(body: Mapping[str, Any], services: Services) -> CompletionRequest:
    """Raises InvalidRequest."""
    refuse_unsupported(body, COMPLETION)
    request = parse(CompletionRequest, body)
    if services.strict_params:
        refuse_unknown(body, CompletionRequest, COMPLETION)
    check_generation(request)
    return request


class CompletionFormat:
    """`respond.Format` for completions."""

    object = chunk_object = "text_completion"
    is_text_only = True

    def __init__(self, request: CompletionRequest, prompt_ids: Sequence[ListedIds], services: Services) -> None:
        """`prompt_ids`: each prompt's, if the client wants them back."""
        self._prompt_ids = prompt_ids
        self._n = request.n or 1
        self._with_logprobs = request.logprobs is not None
        self._with_ids = bool(request.return_token_ids)
        self._prompt_top = request.prompt_logprobs
        self._logprobs = LogprobFormat(
            services.tokenizer.vocabulary,
            as_token_ids=bool(request.return_tokens_as_token_ids),
            top=request.logprobs,
        )

    def whole_choice(self, index: int, choice: WholeChoice) -> Json:
        body = self._choice(index, choice, is_first=True)
        if self._prompt_top is not None:
            body["prompt_logprobs"] = self._logprobs.prompt(choice.prompt_logprobs, self._prompt_top)
        return body

    def chunk_choices(self, delta: Delta) -> Iterator[Json]:
        yield self._choice(delta.index, delta, is_first=delta.is_first)

    def extras(self) -> Json:
        return {}

    def usage_details(self) -> Json:
        return {}

    def _choice(self, index: int, part: WholeChoice | Delta, *, is_first: bool) -> Json:
        body: Json = {
            "index": index,
            "text": part.text,
            "logprobs": self._logprobs.completion(_all_records(part)) if self._with_logprobs else None,
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        if part.hidden is not None:
            body["hidden_states"] = part.hidden.body()
        if self._with_ids:
            body["token_ids"] = [record.token_id for record in part.tokens]
            if is_first:
                body["prompt_token_ids"] = self._prompt_ids[index // self._n]
        return body


def _all_records(part: WholeChoice | Delta) -> list[TokenRecord]:
    return [*part.prompt, *part.tokens]
