"""POST /v1/chat/completions: messages through the model's chat template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from runner.messages import TokenLogprobs
from server.answer import open_answer
from server.body import read_json
from server.choices import Delta, TokenRecord
from server.conversation import parse_messages
from server.errors import InvalidRequest, UnsupportedParameter
from server.inputs import Prompt, encode_prompt
from server.logprobs import LogprobFormat
from server.openapi import json_body
from server.request_context import release_body
from server.respond import Envelope, Json, WholeChoice, run_handler, streamed_response, whole_response
from server.schemas import ChatRequest, TokenizeRequest, check_generation, parse
from server.services import Services, services_of
from server.truncation import Truncation
from server.unsupported import CHAT, refuse_unknown, refuse_unsupported

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=json_body(ChatRequest, streams=True))
async def chat_completions(request: Request) -> Response:
    # The body has no name here, so that `_chat` can let go of it.
    return await run_handler(request, _chat(await read_json(request), services_of(request)))


async def _chat(body: Mapping[str, Any], services: Services) -> Response:
    request = parse_chat(body, services)
    del body
    envelope = Envelope.new("chatcmpl", services.model_name(request.model), services.system_fingerprint)
    prompt = Prompt.from_token_ids(await chat_prompt_ids(request, services), "messages")
    form = ChatFormat(request, prompt, services)
    answer = await open_answer(request, [prompt], services, envelope.id)
    release_body()
    if request.stream:
        return streamed_response(answer, form, envelope, request.stream_options)
    return await whole_response(answer, form, envelope)


def parse_chat(body: Mapping[str, Any], services: Services) -> ChatRequest:
    """Raises InvalidRequest."""
    refuse_unsupported(body, CHAT)
    request = parse(ChatRequest, body)
    if services.strict_params:
        refuse_unknown(body, ChatRequest, CHAT)
    check_generation(request)
    return request


async def chat_prompt_ids(request: ChatRequest | TokenizeRequest, services: Services) -> list[int]:
    """The token ids of a conversation. Raises APIError."""
    return await encode_chat_text(await chat_prompt_text(request, services), request, services)


async def chat_prompt_text(request: ChatRequest | TokenizeRequest, services: Services) -> str:
    """What the template makes of a conversation. Raises APIError."""
    template = services.chat_template
    _check_template(request, services)
    keep_developer = template.mentions("developer", request.chat_template)
    messages = parse_messages(request.messages, keep_developer=keep_developer)
    variables = request.chat_template_kwargs or {}
    for key in sorted(template.reserved_names & variables.keys()):
        raise InvalidRequest(f"chat_template_kwargs must not set {key}.", param="chat_template_kwargs")
    continues = bool(request.continue_final_message)
    return await template.render(
        messages,
        add_generation_prompt=not continues if request.add_generation_prompt is None else request.add_generation_prompt,
        continue_final_message=continues,
        variables=variables,
        documents=request.documents,
        template=request.chat_template,
    )


def _check_template(request: ChatRequest | TokenizeRequest, services: Services) -> None:
    """Raises UnsupportedParameter for what the template would ignore, or the operator does not want."""
    if request.chat_template is not None and not services.trust_request_template:
        raise UnsupportedParameter(
            "chat_template is not accepted: the server was started without --trust-request-chat-template.",
            param="chat_template",
        )
    if request.documents and not services.chat_template.mentions("documents", request.chat_template):
        raise UnsupportedParameter(
            "documents are not supported: this model's chat template knows none.", param="documents"
        )


async def encode_chat_text(text: str, request: ChatRequest | TokenizeRequest, services: Services) -> list[int]:
    """Templates write the special tokens themselves. Raises APIError."""
    truncation = None
    if isinstance(request, ChatRequest):
        truncation = Truncation.of(request, services.model.max_model_len)
    token_ids = await encode_prompt(
        text,
        services,
        add_special_tokens=bool(request.add_special_tokens),
        param="messages",
        truncation=truncation,
    )
    if not token_ids:
        raise InvalidRequest("The chat template made an empty prompt of these messages.", param="messages")
    return token_ids


class ChatFormat:
    """`respond.Format` for chat completions."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, request: ChatRequest, prompt: Prompt, services: Services) -> None:
        self._prompt = prompt
        self._with_logprobs = bool(request.logprobs)
        self._with_ids = bool(request.return_token_ids)
        self._service_tier = request.service_tier
        self._prompt_top = request.prompt_logprobs
        self._prompt_logprobs: Sequence[TokenLogprobs | None] = ()
        self._logprobs = LogprobFormat(
            services.tokenizer.vocabulary, as_token_ids=bool(request.return_tokens_as_token_ids)
        )

    def whole_choice(self, index: int, choice: WholeChoice) -> Json:
        self._prompt_logprobs = choice.prompt_logprobs  # the same for every choice
        body: Json = {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs.chat(choice.tokens) if self._with_logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._with_ids:
            body["token_ids"] = [record.token_id for record in choice.tokens]
        return body

    def chunk_choices(self, delta: Delta) -> Iterator[Json]:
        """The role first, then content, and the reason for the end in a chunk of its own."""
        if delta.is_first:
            yield self._chunk(delta.index, {"role": "assistant", "content": ""}, ())
        if delta.text or delta.tokens:
            yield self._chunk(delta.index, {"content": delta.text}, delta.tokens)
        if delta.finish_reason is not None:
            end = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
            yield self._chunk(delta.index, {}, ()) | end

    def extras(self) -> Json:
        extras: Json = {"service_tier": "default"} if self._service_tier is not None else {}
        if self._with_ids:
            extras["prompt_token_ids"] = list(self._prompt.token_ids)
        if self._prompt_logprobs and self._prompt_top is not None:
            extras["prompt_logprobs"] = self._logprobs.prompt(self._prompt_logprobs, self._prompt_top)
        return extras

    def _chunk(self, index: int, delta: Json, tokens: tuple[()] | list[TokenRecord]) -> Json:
        body: Json = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs.chat(tokens) if self._with_logprobs and tokens else None,
            "finish_reason": None,
        }
        if self._with_ids and tokens:
            body["token_ids"] = [record.token_id for record in tokens]
        return body
