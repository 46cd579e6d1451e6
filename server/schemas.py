"""The requests' parameters: types and limits. Values that depend on the model are checked by `sampling` and `inputs`.

Strict throughout: `true` is not 1, `"5"` is not 5, and 1.0 is no integer, because a client that mixes them up has made
a mistake it should hear of. A number with a fraction may be written without one (`temperature: 1`). `null` is the
default. Fields of any size (prompts, messages, embeddings) are `Any` here and checked where they are read: a schema
would report one error per item.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    WithJsonSchema,
    field_validator,
)

from server.errors import InvalidRequest, validation_error
from server.segments import MAX_PARTS

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_TOKENS = 2**31 - 1
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 128
MAX_TEMPLATE_CHARS = 65536
MAX_TEMPLATE_VARIABLES = 1024
MAX_DOCUMENTS = 1024
MAX_LATENT_STEPS = 1024

_HiddenStates = Annotated[
    Literal["last", "answer", "all"] | None,
    WithJsonSchema({"anyOf": [{"enum": ["last", "answer", "all", False]}, {"type": "null"}]}),
]
_StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]
_BadWord = Annotated[str, StringConstraints(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
_Documents = Annotated[list[dict[str, Any]], Field(max_length=MAX_DOCUMENTS)]
"""Their keys are the template's business."""
_Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]


def _plain_salt(value: str) -> str:
    if any(character in value for character in "@/\\\0"):
        raise ValueError("must not contain @, /, \\ or NUL")
    return value


CacheSalt = Annotated[str, StringConstraints(min_length=1, max_length=128), AfterValidator(_plain_salt)]


def _few_variables(value: Any) -> Any:
    # Before they are looked at: each becomes a variable of the template's, and a million take a second.
    if isinstance(value, dict) and len(value) > MAX_TEMPLATE_VARIABLES:
        raise ValueError(f"must have at most {MAX_TEMPLATE_VARIABLES} entries")
    return value


TemplateVariables = Annotated[dict[str, Any], BeforeValidator(_few_variables)]


def _json_type(*types: str, **more: Any) -> WithJsonSchema:
    """How a field that is checked by hand looks in /openapi.json: one of these types, or null."""
    return WithJsonSchema({"type": [*types, "null"], **more})


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_STRINGS = {"type": "array", "items": {"type": "string"}}


def _part(kind: str, key: str, value: dict[str, Any]) -> dict[str, Any]:
    properties = {"type": {"const": kind}, key: value}
    return {"type": "object", "required": list(properties), "properties": properties}


_TEXT_PART = _part("text", "text", {"type": "string"})
_EMBEDDING_PARTS = (
    _part("prompt_embeds", "data", {"type": "string", "contentEncoding": "base64"}),
    _part("prompt_embeds", "id", {"type": "string"}),
    _part("prompt_embeds", "part", {"type": "string"}),
)
_IDS_PART = _part("token_ids", "token_ids", {**_IDS, "minItems": 1})
_IMAGE_URL = {
    "type": "object",
    "required": ["url"],
    "properties": {"url": {"type": "string"}, "detail": {"enum": ["auto", "low", "high", "original", None]}},
}
_IMAGE_PART = _part("image_url", "image_url", {"anyOf": [_IMAGE_URL, {"type": "string"}]})
_MIXED = {
    "type": "array",
    "items": {"oneOf": [_TEXT_PART, _IDS_PART, *_EMBEDDING_PARTS, _IMAGE_PART]},
    "minItems": 1,
    "maxItems": MAX_PARTS,
}
_PROMPT = {
    "anyOf": [
        {"type": "string"},
        _STRINGS,
        _IDS,
        _MIXED,
        {"type": "array", "items": {"anyOf": [_IDS, _MIXED]}},
        {"type": "null"},
    ]
}
_STOP_STRING = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_STOP_LIST = {"type": "array", "items": _STOP_STRING, "maxItems": MAX_STOPS}
_STOP = {"anyOf": [_STOP_STRING, _STOP_LIST, {"type": "null"}]}
_REFUSAL_PART = _part("refusal", "refusal", {"type": "string"})
_CONTENT_PART = {"oneOf": [_TEXT_PART, _REFUSAL_PART, *_EMBEDDING_PARTS, _IMAGE_PART]}
_PARTS = {"type": "array", "items": _CONTENT_PART, "minItems": 1}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string"},
        "content": {"anyOf": [{"type": "string"}, _PARTS, {"type": "null"}]},
    },
}
_MESSAGES = {"type": "array", "items": _MESSAGE, "minItems": 1}
_TOOL_CHOICE = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {"type": "object", "required": ["type", "function"]},
        {"type": "null"},
    ]
}


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RequestBody(BaseModel):
    model_config = ConfigDict(
        strict=True,
        extra="ignore",
        frozen=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
        protected_namespaces=(),
    )


class GenerationRequest(RequestBody):
    """What completions and chat completions have in common."""

    model: str | None = None
    """Missing: the model that is served."""

    @property
    def num_made(self) -> int:
        """Choices that the engine makes for each prompt."""
        return self.n or 1

    temperature: float | None = Field(None, ge=0.0, le=2.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=-1, le=MAX_TOKENS)
    """0 or -1: off."""
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: float | None = Field(None, gt=0.0, le=100.0)
    seed: int | None = Field(None, ge=INT64_MIN, le=INT64_MAX)
    """-1: as if not given."""
    logit_bias: dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]] | None = None

    n: int | None = Field(None, ge=1, le=MAX_N)
    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)
    min_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)
    stop: Annotated[Annotated[list[_StopString], Field(max_length=MAX_STOPS)] | None, WithJsonSchema(_STOP)] = None
    """One string is a list of one."""
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    allowed_token_ids: Annotated[Any, _json_type("array", items={"type": "integer"})] = None
    bad_words: Annotated[list[_BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None

    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=MAX_TOKENS)
    """-1: as many as leave room for `max_tokens`."""
    truncation_side: Literal["left", "right"] | None = None
    """Where tokens are dropped; missing: left, so that the prompt's end stays."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None

    response_format: Annotated[Any, _json_type("object")] = None
    structured_outputs: Annotated[Any, _json_type("object")] = None
    guided_json: Annotated[Any, _json_type("object", "string", "boolean")] = None
    guided_json_object: Annotated[Any, _json_type("boolean")] = None
    guided_regex: Annotated[Any, _json_type("string")] = None
    guided_choice: Annotated[Any, _json_type("array", items={"type": "string"})] = None
    guided_grammar: Annotated[Any, _json_type("string")] = None
    guided_whitespace_pattern: Annotated[Any, _json_type("string")] = None
    guided_decoding_backend: Annotated[Any, _json_type("string")] = None

    cache_salt: CacheSalt | None = None
    priority: int | None = Field(None, ge=INT64_MIN, le=INT64_MAX)
    """Lower goes first."""
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    """Both values give the same text: only slow tokenizers know such spaces."""
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_hidden_states: _HiddenStates = None
    """See `hidden_states`."""
    latent_steps: int | None = Field(None, ge=0, le=MAX_LATENT_STEPS)
    """Rows between prompt and answer that are the model's own last hidden states."""

    @field_validator("return_hidden_states", mode="before")
    @classmethod
    def _false_is_none(cls, value: Any) -> Any:
        return None if value is False else value  # what SGLang's clients send

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_as_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _something_is_left(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("must be -1 or at least 1")
        return value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _bias_is_short(cls, value: Any) -> Any:
        # Before its entries are looked at: a million wrong ones would make a million errors.
        if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
            raise ValueError(f"must have at most {MAX_LOGIT_BIAS} entries")
        return value


class CompletionRequest(GenerationRequest):
    prompt: Annotated[Any, WithJsonSchema(_PROMPT)] = None
    """A string, a list of them, token ids, a list of parts (text, token ids, embeddings), or a list of such lists."""
    prompt_embeds: Annotated[Any, _json_type("string", "array", items={"type": "string"})] = None
    """Base64 of a tensor file, or a list of them."""
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = Field(None, ge=1, le=MAX_N)
    """So many choices are made, of which the `n` most probable ones per token are answered."""

    @property
    def num_made(self) -> int:
        return max(self.best_of or 1, self.n or 1)


class ChatRequest(GenerationRequest):
    messages: Annotated[Any, WithJsonSchema(_MESSAGES)] = None
    max_completion_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)
    """Wins over `max_tokens`."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    chat_template: Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEMPLATE_CHARS)] | None = None
    documents: _Documents | None = None
    service_tier: Annotated[str, StringConstraints(max_length=64)] | None = None
    tools: Annotated[Any, _json_type("array", items={"type": "object"})] = None
    tool_choice: Annotated[Any, WithJsonSchema(_TOOL_CHOICE)] = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None


class TokenizeRequest(RequestBody):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Any, WithJsonSchema(_MESSAGES)] = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    chat_template: Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEMPLATE_CHARS)] | None = None
    documents: _Documents | None = None
    tools: Annotated[Any, _json_type("array", items={"type": "object"})] = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestBody):
    model: str | None = None
    tokens: Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "integer"}})] = None


class AbortRequest(RequestBody):
    id: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    """An answer's own id."""


_Generation = TypeVar("_Generation", bound=GenerationRequest)

_OF_ANY_SIZE = (
    "prompt", "prompt_embeds", "messages", "documents", "tools", "tool_choice", "chat_template",
    "chat_template_kwargs", "response_format", "structured_outputs", "guided_json", "guided_json_object",
    "guided_regex", "guided_choice", "guided_grammar", "guided_whitespace_pattern", "guided_decoding_backend",
)  # fmt: skip


def without_input(request: _Generation) -> _Generation:
    """What is needed of a request while it is answered: all but its fields of any size."""
    fields = type(request).model_fields
    return request.model_copy(update={name: None for name in _OF_ANY_SIZE if name in fields})


_Schema = TypeVar("_Schema", bound=BaseModel)


def parse(schema: type[_Schema], body: Mapping[str, Any]) -> _Schema:
    """Raises InvalidRequest, which names the fields and their limits and never a value."""
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False, include_context=False, include_input=False)) from None


def check_generation(request: GenerationRequest) -> None:
    """The rules that tie several parameters. Raises InvalidRequest."""
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options is only allowed with stream: true.", param="stream_options")
    if request.stream and request.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs are not streamed.", param="prompt_logprobs")
    if isinstance(request, ChatRequest):
        if request.top_logprobs and not request.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true.", param="top_logprobs")
        if request.continue_final_message and request.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message excludes add_generation_prompt.", param="continue_final_message"
            )
    elif isinstance(request, CompletionRequest) and request.best_of is not None:
        n = request.n or 1
        if request.best_of < n:
            raise InvalidRequest(f"best_of must be at least n ({n}).", param="best_of")
        if request.stream and request.best_of > n:
            raise InvalidRequest("best_of must equal n in a stream: choices are ranked by their ends.", param="best_of")
