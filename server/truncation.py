"""`truncate_prompt_tokens` and `truncation_side`: what is kept of a prompt that is too long. Made from a request by
`inputs` and `chat`, applied by the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from server.sampling import COMPLETION_MAX_TOKENS
from server.schemas import ChatRequest, GenerationRequest


@dataclass(frozen=True, slots=True)
class Truncation:
    keep: int
    """Tokens, special ones included. At least 1."""
    side: Literal["left", "right"]
    """Where tokens are dropped."""

    @classmethod
    def of(cls, request: GenerationRequest, max_model_len: int) -> Truncation | None:
        """None where the request does not ask for it."""
        keep = request.truncate_prompt_tokens
        if keep is None:
            return None
        if keep == -1:
            keep = max(max_model_len - _answer_tokens(request) - (request.latent_steps or 0), 1)
        return cls(keep, request.truncation_side or "left")

    def of_ids(self, token_ids: list[int]) -> list[int]:
        return token_ids[-self.keep :] if self.side == "left" else token_ids[: self.keep]


def _answer_tokens(request: GenerationRequest) -> int:
    if isinstance(request, ChatRequest):
        asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        return 1 if asked is None else asked
    return COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
