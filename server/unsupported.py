"""Parameters that clients know and this server does not honour.

Ignoring one that would change the answer is the worst choice: the client gets an unconstrained text and a 200. So each
of them is refused, unless its value asks for nothing. Parameters that only keep the client's books (`user`,
`metadata`, `store`, …) or hint (`reasoning_effort`, `prediction`, …) are accepted, and so are names nobody knows,
unless the server was started with --strict-params.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel

from server.errors import InvalidRequest, UnsupportedParameter, bounded

_Neutral = Callable[[Any], bool]


def _empty(value: Any) -> bool:
    """Nothing asked for: null, false, an empty list, object or string. (0 is a number and may mean something.)"""
    return value is None or value is False or (isinstance(value, list | dict | str) and not value)


def _one_of(*values: Any) -> _Neutral:
    # By type too: 0 == False and 1.0 == True.
    return lambda value: value is None or any(type(value) is type(each) and value == each for each in values)


_COMMON: dict[str, _Neutral] = {
    "custom_logit_processor": _empty,
    "detokenize": _one_of(True),
    "ebnf": _empty,
    "extra_args": _empty,
    "json_schema": _empty,
    "kv_transfer_params": _empty,
    "length_penalty": _one_of(1, 1.0),
    "logits_processors": _empty,
    "logprob_token_ids": _empty,
    "lora_path": _empty,
    "no_stop_trim": _empty,
    "regex": _empty,
    "repetition_detection": _empty,
    "stop_regex": _empty,
    "thinking_token_budget": _empty,
    "use_beam_search": _empty,
    "vllm_xargs": _empty,
}

COMPLETION: dict[str, _Neutral] = {
    **_COMMON,
    "functions": _empty,
    "max_completion_tokens": _empty,
    "messages": _empty,
    "suffix": _empty,
    "tools": _empty,
    "top_logprobs": _empty,
}

CHAT: dict[str, _Neutral] = {
    **_COMMON,
    "audio": _empty,
    "best_of": _one_of(1),
    "echo": _empty,
    "function_call": _one_of("none", "auto"),
    "functions": _empty,
    "media_io_kwargs": _empty,
    "mm_processor_kwargs": _empty,
    "modalities": lambda value: value is None or value == ["text"],
    "moderation": _empty,
    "prompt": _empty,
    "prompt_embeds": _empty,
    "return_prompt_text": _empty,
    "web_search_options": _empty,
}

RESPONSE: dict[str, _Neutral] = {
    **_COMMON,
    "access_programs": _empty,
    "background_options": _empty,
    "context_management": _empty,
    "conversation": _empty,
    "function_call": _one_of("none", "auto"),
    "functions": _empty,
    "image": _empty,
    "latent_steps": _one_of(0),
    "logprobs": _empty,
    "max_completion_tokens": _empty,
    "max_tokens": _empty,
    "messages": _empty,
    "moderation": _empty,
    "n": _one_of(1),
    "prompt": _empty,
    "prompt_embeds": _empty,
    "response_format": _empty,
    "return_hidden_states": _empty,
}

EMBEDDING: dict[str, _Neutral] = {
    "embed_dtype": _one_of("float32"),
    "endianness": _one_of("native", "little"),
    "messages": _empty,
    "mm_processor_kwargs": _empty,
    "prompt_embeds": _empty,
}


BOOKKEEPING = frozenset({
    "include_reasoning", "metadata", "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "reasoning_effort", "request_id", "rid", "safety_identifier", "service_tier",
    "session_id", "store", "stream_interval", "user", "verbosity",
})  # fmt: skip
"""Known, and without influence on the answer: accepted even where unknown parameters are refused."""


def refuse_unknown(body: Mapping[str, Any], schema: type[BaseModel], table: Mapping[str, _Neutral]) -> None:
    """For --strict-params. Raises InvalidRequest for the first parameter that nobody knows."""
    for name in body:
        if name not in schema.model_fields and name not in table and name not in BOOKKEEPING:
            shown = bounded(name, 100)
            raise InvalidRequest(f"Unknown parameter: {shown}.", param=shown, code="unknown_parameter")


def refuse_unsupported(body: Mapping[str, Any], table: Mapping[str, _Neutral]) -> None:
    """Raises UnsupportedParameter for the first parameter of `table` whose value asks for something."""
    # Over the table, not over the body: a body may have a million keys.
    for name, is_neutral in table.items():
        if name in body and not is_neutral(body[name]):
            raise UnsupportedParameter(f"{name} is not supported by this server.", param=name)
