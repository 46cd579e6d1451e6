"""POST /v1/chat/completions: messages through the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.answer import Answer, open_answer
from server.answer_grammar import answer_grammar
from server.chat_format import ChatFormat, PartsFormat
from server.chat_parts import PartsRules
from server.conversation import parse_messages
from server.embedding_markers import EmbeddingMarkers
from server.errors import InvalidRequest, UnsupportedParameter
from server.inputs import ListedIds, Prompt, check_length, decode_parts, encode_parts, encode_prompt
from server.openapi import json_body
from server.request_body import read_request
from server.request_context import release_body
from server.respond import Envelope, run_handler, streamed_response, whole_response
from server.schemas import ChatRequest, TokenizeRequest, check_generation, parse, without_input
from server.services import Services, services_of
from server.structured_outputs import Constraint, constraint_of
from server.tools.definitions import ToolRequest
from server.tools.requested import parts_rules, requested_tools
from server.truncation import Truncation
from server.unsupported import CHAT, refuse_unknown, refuse_unsupported

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=json_body(ChatRequest, streams=True, tensors=True))
async def chat_completions(request: Request) -> Response:
    # The body has no name here, so that `_chat` can let go of it.
    return await run_handler(request, _chat(await read_request(request), services_of(request)))


async def _chat(body: Mapping[str, Any], services: Services) -> Response:
    request = parse_chat(body, services)
    constraint = constraint_of(body)
    del body
    envelope = Envelope.new("chatcmpl", services.model_name(request.model), services.system_fingerprint)
    # What these were made of may be large, and an answer takes its time: it is not held for it.
    waiting = open_chat(request, constraint, services, envelope.id)
    del request, constraint
    chat = await waiting
    if chat.rules is None:
        form = ChatFormat(chat.request, chat.prompt_ids, services)
    else:
        form = PartsFormat(chat.request, chat.prompt_ids, services, chat.rules)
    release_body()
    if chat.request.stream:
        return streamed_response(chat.answer, form, envelope, chat.request.stream_options)
    return await whole_response(chat.answer, form, envelope)


@dataclass(frozen=True, slots=True)
class OpenChat:
    """A chat request that the engine has accepted."""

    request: ChatRequest
    """Without its fields of any size."""
    prompt_ids: ListedIds
    """If the client wants them back. Not the prompt itself: its embeddings are large, and an answer takes its time."""
    rules: PartsRules | None
    """How the answer is taken apart; None: not at all, it is content."""
    answer: Answer


async def open_chat(
    request: ChatRequest, constraint: Constraint | None, services: Services, answer_id: str
) -> OpenChat:
    """From a checked request to its answer. Raises APIError."""
    tools = requested_tools(request, services)
    embeddings = services.markers()
    text = await chat_prompt_text(request, services, tools, embeddings)
    prompt = await chat_prompt(text, embeddings, request, services)
    rules = parts_rules(request, tools, text, services)
    grammar = await answer_grammar(constraint, rules, services)
    request = without_input(request)
    del text, constraint, embeddings
    answer = await open_answer(
        request,
        [prompt],
        services,
        answer_id,
        grammar=grammar,
        keep_records=rules is not None and rules.reasoning is not None,
        shown_special=frozenset() if rules is None else rules.shown_token_ids(services.tokenizer),
    )
    return OpenChat(request, prompt.listed_ids() if request.return_token_ids else None, rules, answer)


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


async def chat_prompt_text(
    request: ChatRequest | TokenizeRequest,
    services: Services,
    tools: ToolRequest | None = None,
    embeddings: EmbeddingMarkers | None = None,
) -> str:
    """What the template makes of a conversation. `tools`: the request's, if they have been checked. `embeddings`: takes
    the embedding parts, whose markers are in the text; None: there may be none. Raises APIError."""
    template = services.chat_template
    if tools is None:
        tools = requested_tools(request, services)
    _check_template(request, services)
    keep_developer = template.mentions("developer", request.chat_template)
    messages: Sequence[Mapping[str, Any]] = parse_messages(
        request.messages, keep_developer=keep_developer, embeddings=embeddings
    )
    variables = request.chat_template_kwargs or {}
    for key in sorted(template.reserved_names & variables.keys()):
        raise InvalidRequest(f"chat_template_kwargs must not set {key}.", param="chat_template_kwargs")
    continues = bool(request.continue_final_message)
    source = request.chat_template
    if (images := services.image_template) is not None:
        messages = images.with_parts(messages)
        if embeddings is not None and embeddings.images:
            source = images.marked(source or template.source or "")
    return await template.render(
        messages,
        add_generation_prompt=not continues if request.add_generation_prompt is None else request.add_generation_prompt,
        continue_final_message=continues,
        variables=variables,
        tools=tools.definitions,
        documents=request.documents,
        template=source,
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


async def chat_prompt(text: str, embeddings: EmbeddingMarkers, request: ChatRequest, services: Services) -> Prompt:
    """The rows of a conversation: `text` as `chat_prompt_text` makes it, with `embeddings` at their markers. Raises
    APIError."""
    soft = services.soft_rows(request.model)
    if not embeddings:
        return Prompt.from_token_ids(await encode_chat_text(text, request, services), "messages").behind(soft)
    if request.truncate_prompt_tokens is not None:
        raise InvalidRequest(
            "truncate_prompt_tokens does not go with prompt_embeds, soft_prompt or image_url parts.",
            param="truncate_prompt_tokens",
        )
    check_length(text, services, "messages", spare_chars=embeddings.num_chars)
    parts = embeddings.split(text)
    add_special = bool(request.add_special_tokens)
    encoded = await encode_parts(parts, services, add_special_tokens=add_special, param="messages")
    return (await decode_parts(encoded, services, param="messages")).behind(soft)


async def encode_chat_text(text: str, request: ChatRequest | TokenizeRequest, services: Services) -> list[int]:
    """Templates write the special tokens themselves. Raises APIError."""
    truncation = None
    if isinstance(request, ChatRequest):
        soft = services.soft_rows(request.model)
        truncation = Truncation.of(request, services.model.max_model_len - (0 if soft is None else soft.num_rows))
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
