"""The body of POST /v1/responses: types and limits. What chat has too is checked once more there, by the same limits;
`input`, `tools`, `tool_choice` and `text.format` are of any size and checked where they are read."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, WithJsonSchema, field_validator

from server.schemas import INT64_MAX, INT64_MIN, MAX_LOGPROBS, MAX_TOKENS, RequestBody, TemplateVariables

MAX_METADATA = 16
MAX_INCLUDES = 16

_TEXT = {"type": "string"}
_ITEM = {"type": "object", "properties": {"type": {"type": "string"}}}
_INPUT = {"anyOf": [_TEXT, {"type": "array", "items": _ITEM, "minItems": 1}, {"type": "null"}]}
_TOOLS = {"type": ["array", "null"], "items": {"type": "object", "required": ["type", "name"]}}
_TOOL_CHOICE = {"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}, {"type": "null"}]}
_STOP = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}, {"type": "null"}]}

_Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
_MetadataKey = Annotated[str, StringConstraints(max_length=64)]
_MetadataValue = Annotated[str, StringConstraints(max_length=512)]
_Include = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class _Member(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, hide_input_in_errors=True)


class ReasoningOptions(_Member):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """A hint, as chat's `reasoning_effort` is."""
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: Annotated[str, StringConstraints(max_length=64)] | None = None


class TextOptions(_Member):
    format: Annotated[Any, WithJsonSchema({"type": ["object", "null"]})] = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """A hint."""


class ResponseStreamOptions(_Member):
    include_obfuscation: bool | None = None


class ResponseRequest(RequestBody):
    model: str | None = None
    """Missing: the model that is served."""
    input: Annotated[Any, WithJsonSchema(_INPUT)] = None
    """A string, or a list of items."""
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    max_tool_calls: int | None = Field(None, ge=1, le=MAX_TOKENS)
    """Of built-in tools, of which there are none."""
    temperature: float | None = Field(None, ge=0.0, le=2.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    include: Annotated[list[_Include], Field(max_length=MAX_INCLUDES)] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[Any, WithJsonSchema(_TOOLS)] = None
    tool_choice: Annotated[Any, WithJsonSchema(_TOOL_CHOICE)] = None
    parallel_tool_calls: bool | None = None
    metadata: Annotated[dict[_MetadataKey, _MetadataValue], Field(max_length=MAX_METADATA)] | None = None
    store: bool | None = None
    """Missing: true."""
    background: bool | None = None
    previous_response_id: Annotated[str, StringConstraints(min_length=1, max_length=128)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    service_tier: Annotated[str, StringConstraints(max_length=64)] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None

    top_k: int | None = Field(None, ge=-1, le=MAX_TOKENS)
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: float | None = Field(None, gt=0.0, le=100.0)
    seed: int | None = Field(None, ge=INT64_MIN, le=INT64_MAX)
    min_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)
    stop: Annotated[Any, WithJsonSchema(_STOP)] = None
    stop_token_ids: Annotated[Any, WithJsonSchema({"type": ["array", "null"], "items": {"type": "integer"}})] = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[Any, WithJsonSchema({"type": ["object", "null"]})] = None
    structured_outputs: Annotated[Any, WithJsonSchema({"type": ["object", "null"]})] = None
    chat_template_kwargs: TemplateVariables | None = None
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=128)] | None = None
    priority: int | None = Field(None, ge=INT64_MIN, le=INT64_MAX)

    @field_validator("metadata", mode="before")
    @classmethod
    def _metadata_is_short(cls, value: Any) -> Any:
        # Before its entries are looked at: a million wrong ones would make a million errors.
        if isinstance(value, dict) and len(value) > MAX_METADATA:
            raise ValueError(f"must have at most {MAX_METADATA} entries")
        return value

    @field_validator("include", mode="before")
    @classmethod
    def _include_is_short(cls, value: Any) -> Any:
        if isinstance(value, list) and len(value) > MAX_INCLUDES:
            raise ValueError(f"must have at most {MAX_INCLUDES} entries")
        return value

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())


SHARED_WITH_CHAT = (
    "model", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "logit_bias", "structured_outputs",
    "chat_template_kwargs", "cache_salt", "priority", "parallel_tool_calls",
)  # fmt: skip
"""Parameters that a chat request has under the same name."""
