"""What is refused rather than ignored, and what asks for nothing and is let through."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest

from server.errors import InvalidRequest, UnsupportedParameter
from server.schemas import ChatRequest, CompletionRequest
from server.unsupported import CHAT, COMPLETION, refuse_unknown, refuse_unsupported

BOTH: list[tuple[str, list[Any], list[Any]]] = [
    # name, values that ask for something, values that do not
    ("use_beam_search", [True], [None, False]),
    ("length_penalty", [2, True], [None, 1, 1.0]),
    ("logits_processors", [["x"]], [None, []]),
    ("lora_path", ["x"], [None]),
    ("detokenize", [False, 1], [None, True]),
]
COMPLETION_ONLY: list[tuple[str, list[Any], list[Any]]] = [
    ("suffix", ["x"], [None, ""]),
    ("messages", [[{"role": "user"}]], [None]),
    ("max_completion_tokens", [5, 0], [None]),
    ("top_logprobs", [1], [None]),
    ("tools", [[{"type": "function"}]], [None, []]),
]
CHAT_ONLY: list[tuple[str, list[Any], list[Any]]] = [
    ("functions", [[{"name": "f"}]], [None, []]),
    ("function_call", [{"name": "f"}], [None, "none", "auto"]),
    ("audio", [{"voice": "x"}], [None]),
    ("modalities", [["text", "audio"], ["audio"]], [None, ["text"]]),
    ("web_search_options", [{"search_context_size": "low"}], [None]),
    ("echo", [True], [None, False]),
    ("best_of", [2], [None, 1]),
    ("prompt_embeds", ["x"], [None]),
    ("mm_processor_kwargs", [{"x": 1}], [None, {}]),
    ("moderation", [{"x": 1}], [None]),
]
HARMLESS = {
    "user": "x",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "flex",
    "safety_identifier": "x",
    "prompt_cache_key": "x",
    "verbosity": "low",
    "reasoning_effort": "high",
    "prediction": {"type": "content", "content": "x"},
    "parallel_tool_calls": False,
    "request_id": "x",
    "unheard_of": 1,
}


@pytest.mark.parametrize(("name", "asking", "neutral"), BOTH + COMPLETION_ONLY)
def test_completions(name: str, asking: list[Any], neutral: list[Any]) -> None:
    check(COMPLETION, name, asking, neutral)


@pytest.mark.parametrize(("name", "asking", "neutral"), BOTH + CHAT_ONLY)
def test_chat(name: str, asking: list[Any], neutral: list[Any]) -> None:
    check(CHAT, name, asking, neutral)


def check(table: Any, name: str, asking: list[Any], neutral: list[Any]) -> None:
    for value in asking:
        with pytest.raises(UnsupportedParameter) as caught:
            refuse_unsupported({"model": "x", name: value}, table)
        assert (caught.value.param, caught.value.code, caught.value.status) == (name, "unsupported_parameter", 400)
    for value in neutral:
        refuse_unsupported({"model": "x", name: value}, table)


@pytest.mark.parametrize("table", [COMPLETION, CHAT])
def test_bookkeeping_is_let_through(table: Any) -> None:
    refuse_unsupported(HARMLESS, table)


@pytest.mark.parametrize(("schema", "table"), [(CompletionRequest, COMPLETION), (ChatRequest, CHAT)])
def test_strict_servers_refuse_what_nobody_knows(schema: Any, table: Any) -> None:
    known = {name: value for name, value in HARMLESS.items() if name != "unheard_of"}
    refuse_unknown({**known, "temperature": 1, "n": 1, "response_format": None}, schema, table)
    with pytest.raises(InvalidRequest) as caught:
        refuse_unknown({**known, "x" * 10_000: 1}, schema, table)
    assert (caught.value.code, caught.value.param) == ("unknown_parameter", "x" * 100)


def parameters_of_the_openai_package() -> list[tuple[Any, Any, str]]:
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_create_params

    found: list[tuple[Any, Any, str]] = []
    for module, schema, table in (
        (completion_create_params, CompletionRequest, COMPLETION),
        (chat_create_params, ChatRequest, CHAT),
    ):
        names = set(get_type_hints(module.CompletionCreateParamsBase)) | {"stream"}
        found += [(schema, table, name) for name in sorted(names)]
    return found


@pytest.mark.parametrize(("schema", "table", "name"), parameters_of_the_openai_package())
def test_every_parameter_of_the_openai_package_is_known(schema: Any, table: Any, name: str) -> None:
    refuse_unknown({name: None}, schema, table)
