"""The model's chat template: messages to the text of a prompt. Rendering is transformers' (a sandboxed Jinja)."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from server.errors import InvalidRequest, bounded
from server.tokenizer import Tokenizer

_INLINE_CHARS = 16384
"""Conversations up to this length are rendered in place."""
_MAX_REASON_CHARS = 500


class ChatTemplate:
    """`override`: the operator's template (its text); None is the model's own."""

    def __init__(self, tokenizer: Tokenizer, override: str | None = None) -> None:
        self._tokenizer = tokenizer.transformers
        self._override = override
        # From the signature: releases of the library add to it (`sanitize_control_tokens` is one that would matter).
        ours = inspect.signature(self._tokenizer.apply_chat_template).parameters
        self.reserved_names = frozenset(ours) | {"messages", "self"}
        """What a client's `chat_template_kwargs` must not set."""

    @classmethod
    def load(cls, tokenizer: Tokenizer, override: str | None) -> ChatTemplate:
        """`override`: a file, or the template itself. Raises ValueError when it is neither."""
        if override is not None and "{" not in override:
            path = Path(override)
            if not path.is_file():
                raise ValueError(f"--chat-template: {override} is neither a file nor a template")
            override = path.read_text(encoding="utf-8")
        return cls(tokenizer, override)

    async def render(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text, special tokens included. `variables`: further names for the template (without
        `reserved_names`). Raises InvalidRequest when there is no template or it refuses the messages."""
        if self._override is None and not self._tokenizer.chat_template:
            raise InvalidRequest(
                "This model has no chat template: use /v1/completions, or start the server with --chat-template.",
                param="messages",
            )
        arguments = {
            **(variables or {}),
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        if sum(len(message["content"]) for message in messages) <= _INLINE_CHARS:
            return self._render(messages, arguments)
        return await asyncio.to_thread(self._render, messages, arguments)

    def _render(self, messages: Sequence[Mapping[str, str]], arguments: Mapping[str, Any]) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), chat_template=self._override, tokenize=False, **arguments
            )
        except jinja2.TemplateError as error:
            # What a template says with `raise_exception` is meant for whoever wrote the messages.
            reason = bounded(str(error), _MAX_REASON_CHARS)
            raise InvalidRequest(f"The chat template refused the messages: {reason}", param="messages") from None
        except Exception:
            # Templates add, slice and compare what they are given, and fail in as many ways.
            raise InvalidRequest("The chat template cannot render these messages.", param="messages") from None
        return str(text)
