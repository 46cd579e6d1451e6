"""The model's chat template: messages to the text of a prompt. Rendering is transformers' (a sandboxed Jinja)."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jinja2

from server.bounded_threads import BoundedThreads
from server.conversation import ParsedArguments
from server.errors import InvalidRequest, bounded
from server.tokenizer import Tokenizer

_INLINE_CHARS = 16384
_INLINE_MESSAGES = 32
"""Conversations up to this length are rendered in place: a few hundred microseconds."""
_MAX_SECONDS = 10.0
_THREADS = 2
_MAX_REASON_CHARS = 500


class ChatTemplate:
    """`override`: the operator's template (its text); None is the model's own."""

    def __init__(self, tokenizer: Tokenizer, override: str | None = None) -> None:
        self._tokenizer = tokenizer.transformers
        self._override = override
        self._threads = BoundedThreads(_THREADS, _MAX_SECONDS, "template")
        # From the signature: releases of the library add to it (`sanitize_control_tokens` is one that would matter).
        ours = inspect.signature(self._tokenizer.apply_chat_template).parameters
        self.reserved_names = frozenset(ours) | {"messages", "self"}
        """What a client's `chat_template_kwargs` must not set."""
        self._wants_text_of: dict[str | None, bool] = {}

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
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
    ) -> str:
        """The prompt's text, special tokens included. `messages`: as `conversation` makes them, the arguments of calls
        as objects. `variables`: further names for the template (without `reserved_names`). `template`: instead of the
        server's. Raises InvalidRequest when there is no template, when it refuses the messages, and when it is not done
        in time."""
        if template is None and self._override is None and not self._tokenizer.chat_template:
            raise InvalidRequest(
                "This model has no chat template: use /v1/completions, or start the server with --chat-template.",
                param="messages",
            )
        arguments = {
            **(variables or {}),
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template": self._override if template is None else template,
            **({} if documents is None else {"documents": list(documents)}),
            **({} if tools is None else {"tools": list(tools)}),
        }
        plain = template is None and not variables and not documents and not tools and len(messages) <= _INLINE_MESSAGES
        if plain and sum(map(_size, messages)) <= _INLINE_CHARS:
            return self._render(messages, arguments)
        try:
            return await self._threads.run(partial(self._render, messages, arguments))
        except TimeoutError:
            raise InvalidRequest(
                f"The chat template takes longer than {_MAX_SECONDS:g} s for these messages.", param="messages"
            ) from None

    @property
    def source(self) -> str | None:
        """The template's text: of several, the one for plain conversations. None where there is none."""
        text = self._override or self._tokenizer.chat_template
        if isinstance(text, dict):
            text = text.get("default")
        return text if isinstance(text, str) else None

    def mentions(self, word: str, template: str | None = None) -> bool:
        """Whether the template (`template`, or else the server's) has `word` in it, so that it may know such a role or
        variable. Without the word it certainly does not."""
        text = template or self._override or self._tokenizer.chat_template or ""
        return any(word in each for each in (text.values() if isinstance(text, dict) else (text,)))

    @property
    def all_text(self) -> str:
        """Every template that the model has, as one text; empty where there is none."""
        text = self._override or self._tokenizer.chat_template or ""
        return "\n".join(text.values()) if isinstance(text, dict) else text

    def probe(self, messages: Sequence[Mapping[str, Any]], template: str) -> str:
        """What a template makes of some messages; empty where it fails."""
        try:
            return str(self._tokenizer.apply_chat_template(list(messages), tokenize=False, chat_template=template))
        except Exception:
            return ""

    def close(self) -> None:
        self._threads.close()

    def _render(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> str:
        if any("tool_calls" in message for message in messages) and self._wants_text(arguments):
            messages = [_with_arguments_as_text(message) for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, **arguments)
        except jinja2.TemplateError as error:
            # What a template says with `raise_exception` is meant for whoever wrote the messages.
            reason = bounded(str(error), _MAX_REASON_CHARS)
            raise InvalidRequest(f"The chat template refused the messages: {reason}", param="messages") from None
        except Exception:
            # Templates add, slice and compare what they are given, and fail in as many ways.
            raise InvalidRequest("The chat template cannot render these messages.", param="messages") from None
        return str(text)

    def _wants_text(self, arguments: Mapping[str, Any]) -> bool:
        """Whether the template takes a call's arguments as JSON text, and not as an object that it encodes itself.
        It is tried: no template says so."""
        template = arguments["chat_template"]
        if template not in self._wants_text_of:
            as_object, as_text = self._probe(template, _PROBE), self._probe(template, _with_arguments_as_text(_PROBE))
            # Where it makes no difference, text: it is what the model wrote, to the character.
            found = bool(as_text) and as_object in ("", as_text)
            if template != self._override:
                return found  # a client's: not worth remembering
            self._wants_text_of[template] = found
        return self._wants_text_of[template]

    def _probe(self, template: str | None, call: Mapping[str, Any]) -> str:
        """What the template makes of a call; empty if its arguments are not in there as JSON."""
        messages = [{"role": "user", "content": "?"}, call]
        try:
            text = str(self._tokenizer.apply_chat_template(messages, tokenize=False, chat_template=template))
        except Exception:
            return ""
        return text if '{"probed_key": "value"}' in text else ""


_PROBE = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "probe0000", "type": "function", "function": {"name": "probe", "arguments": {"probed_key": "value"}}}
    ],
}


def _with_arguments_as_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = [{**call, "function": _as_text(call["function"])} for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}


def _as_text(function: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = function["arguments"]
    if isinstance(arguments, ParsedArguments):
        return {**function, "arguments": arguments.text}
    return {**function, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}


def _size(message: Mapping[str, Any]) -> int:
    """Characters that the template has to deal with, roughly."""
    calls = sum(len(str(call["function"]["arguments"])) for call in message.get("tool_calls", ()))
    content = message["content"]
    if not isinstance(content, str):
        calls += sum(len(item.get("text", "")) for item in content)
    return len(content) + len(message.get("reasoning_content", "")) + calls
