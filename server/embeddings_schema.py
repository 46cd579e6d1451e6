"""The bodies of /v1/embeddings and /v1/token_embeddings: types and limits. What depends on the model is checked where
it is used."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, WithJsonSchema, field_validator

from server.schemas import MAX_TOKENS, CacheSalt, RequestBody

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PARTS = {"type": "array", "items": {"type": "object", "required": ["type"]}, "minItems": 1}
_ITEM = {"anyOf": [{"type": "string"}, _IDS, _PARTS]}
_INPUT = {"anyOf": [*_ITEM["anyOf"], {"type": "array", "items": _ITEM, "minItems": 1}]}


class EmbeddingRequest(RequestBody):
    model: str | None = None
    """Missing: the model that is served."""
    input: Annotated[Any, WithJsonSchema(_INPUT)]
    """A string, token ids, a list of parts, or a list of such inputs."""
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=MAX_TOKENS)
    user: Annotated[str, StringConstraints(max_length=512)] | None = None
    pooling: Literal["mean", "last"] | None = None
    """Missing: the server's default."""
    normalize: bool | None = None
    """Missing: true, as OpenAI's are."""
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=MAX_TOKENS)
    """-1: to the context's length."""
    truncation_side: Literal["left", "right"] | None = None
    """Where tokens are dropped; missing: right."""
    cache_salt: CacheSalt | None = None

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _something_is_left(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("must be -1 or at least 1")
        return value


class TokenEmbeddingsRequest(RequestBody):
    model: str | None = None
    input: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, _IDS]})]
    """A text or token ids."""
    add_special_tokens: bool | None = None
