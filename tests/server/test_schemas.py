"""Types and limits of the parameters. Every row of the limits is here once, at its edge and beyond it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from server.errors import InvalidRequest
from server.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    check_generation,
    parse,
    without_input,
)

WITHIN: list[tuple[str, list[Any]]] = [
    ("temperature", [0, 0.0, 1, 2, 2.0]),
    ("top_p", [1e-6, 1, 1.0]),
    ("top_k", [-1, 0, 1, 2**31 - 1]),
    ("min_p", [0, 1]),
    ("presence_penalty", [-2, 2]),
    ("frequency_penalty", [-2.0, 2.0]),
    ("repetition_penalty", [0.1, 1, 100]),
    ("seed", [-(2**63), -1, 0, 2**63 - 1]),
    ("logit_bias", [{}, {"5": -100, "6": 100.0}]),
    ("n", [1, 128]),
    ("max_tokens", [0, 1, 2**31 - 1]),
    ("min_tokens", [0, 5]),
    ("stop", [[], "x", ["a", "b", "c", "d"], "x" * 1024]),
    ("stop_token_ids", [[], [1, 2], [0] * 128]),
    ("cache_salt", ["x", "x" * 128]),
    ("stream", [True, False]),
    ("ignore_eos", [True]),
    ("logprobs", [0, 20]),
    ("best_of", [1, 128]),
    ("prompt_logprobs", [0, 20]),
    ("truncate_prompt_tokens", [-1, 1, 2**31 - 1]),
    ("truncation_side", ["left", "right"]),
    ("bad_words", [[], ["x"] * 128, ["x" * 128]]),
    ("priority", [-(2**63), 0, 2**63 - 1]),
    ("spaces_between_special_tokens", [True, False]),
]
BEYOND: list[tuple[str, list[Any]]] = [
    ("temperature", [-0.1, 2.1, "1", True, [1], 10**400]),
    ("top_p", [0, 0.0, 1.1, "1", True]),
    ("top_k", [-2, 1.5, 1.0, "1", True, 2**31]),
    ("min_p", [-0.1, 1.1, True]),
    ("presence_penalty", [-2.1, 2.1, "0"]),
    ("frequency_penalty", [-2.1, 2.1, True]),
    ("repetition_penalty", [0, -1, 101, "1"]),
    ("seed", [-(2**63) - 1, 2**63, 2**64, 1.5, 1.0, "1", True]),
    ("logit_bias", [{"5": 101}, {"5": -101}, {"5": "1"}, {"5": True}, [], "x", {str(i): 1 for i in range(1025)}]),
    ("n", [0, -1, 129, 10**6, 1.0, "2", True, 10**400]),
    ("max_tokens", [-1, 2**31, 16.0, "16", True, 10**8 * 1.0]),
    ("min_tokens", [-1, 1.0]),
    ("stop", ["", [""], ["a"] * 5, [5], 5, "x" * 1025, {"a": 1}]),
    ("stop_token_ids", [[0] * 129, ["1"], [1.0], [True], 5, "1"]),
    ("cache_salt", ["", "x" * 129, "a@b", "a/b", "a\\b", "a\0b", 5]),
    ("stream", [1, "true", 0]),
    ("ignore_eos", [1, "yes"]),
    ("model", [5, ["x"]]),
    ("logprobs", [-1, 21, True, 1.0, "1"]),
    ("best_of", [0, 10**6, 129]),
    ("prompt_logprobs", [-1, 21, True, 1.0, "1"]),
    ("truncate_prompt_tokens", [-2, 0, 2**31, True, 1.0, "1"]),
    ("truncation_side", ["middle", 1, ""]),
    ("bad_words", ["x", [""], ["x"] * 129, ["x" * 129], [5], {"x": 1}]),
    ("priority", [-(2**63) - 1, 2**63, True, 1.0, "1"]),
    ("spaces_between_special_tokens", [1, "yes"]),
    ("echo", ["true", 1]),
    ("stream_options", ["x", [], {"include_usage": 1}, {"continuous_usage_stats": "x"}]),
]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WITHIN for value in values])
def test_within_the_limit(name: str, value: Any) -> None:
    request = parse(CompletionRequest, {name: value})
    assert getattr(request, name) == ([value] if name == "stop" and isinstance(value, str) else value)


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in BEYOND for value in values],
    ids=lambda value: repr(value)[:30],
)
def test_beyond_it(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(CompletionRequest, {name: value})
    error = caught.value
    assert error.param is not None
    assert error.param.split(".")[0] == name
    assert error.message.startswith(name)
    assert len(error.message) < 4096


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logprobs", 1),
        ("logprobs", "true"),
        ("top_logprobs", 21),
        ("top_logprobs", -1),
        ("top_logprobs", True),
        ("max_completion_tokens", -1),
        ("max_completion_tokens", "5"),
        ("chat_template_kwargs", []),
        ("chat_template_kwargs", {str(number): 1 for number in range(1025)}),
        ("chat_template", ""),
        ("chat_template", "x" * 65537),
        ("chat_template", 5),
        ("service_tier", 5),
        ("add_generation_prompt", "no"),
    ],
)
def test_beyond_it_in_chat(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(ChatRequest, {name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("schema", [CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest])
def test_null_is_the_default_and_unknown_names_are_let_be(schema: type[CompletionRequest]) -> None:
    nulls = dict.fromkeys(schema.model_fields)
    assert parse(schema, {**nulls, "user": "x", "metadata": {}, "unheard_of": 5}) == parse(schema, {})


def test_the_limit_is_named_and_the_value_is_not() -> None:
    with pytest.raises(InvalidRequest, match="max_tokens") as caught:
        parse(CompletionRequest, {"max_tokens": "a secret", "temperature": 1e300, "top_p": 7})
    assert "secret" not in caught.value.message
    assert "e+300" not in caught.value.message
    assert "less than or equal to 2" in caught.value.message


@pytest.mark.parametrize(
    "body",
    [
        {"stop_token_ids": ["x"] * 300_000},
        {"stop": [""] * 300_000},
        {"logit_bias": {str(key): "x" for key in range(300_000)}},
        {"logit_bias": {"x" * 100_000: "y"}},
        {"stream_options": {str(key): key for key in range(100_000)}},
    ],
    ids=["ids", "stops", "biases", "key", "options"],
)
def test_a_huge_mistake_costs_little(body: dict[str, Any]) -> None:
    started = time.thread_time()  # whatever else the machine is doing
    try:
        parse(CompletionRequest, body)
    except InvalidRequest as error:
        assert len(error.message) < 4096
    assert time.thread_time() - started < 1


@pytest.mark.parametrize(
    ("schema", "body", "param"),
    [
        (CompletionRequest, {"stream_options": {}}, "stream_options"),
        (CompletionRequest, {"stream_options": {"include_usage": True}, "stream": False}, "stream_options"),
        (CompletionRequest, {"best_of": 2, "stream": True}, "best_of"),
        (CompletionRequest, {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        (ChatRequest, {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        (CompletionRequest, {"best_of": 1, "n": 2}, "best_of"),
        (ChatRequest, {"top_logprobs": 3}, "top_logprobs"),
        (ChatRequest, {"top_logprobs": 3, "logprobs": False}, "top_logprobs"),
        (ChatRequest, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
def test_parameters_that_do_not_go_together(schema: type[CompletionRequest], body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_generation(parse(schema, body))
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        (CompletionRequest, {"stream_options": {"include_usage": True}, "stream": True}),
        (CompletionRequest, {"best_of": 2, "n": 2, "stream": True}),
        (CompletionRequest, {"best_of": 3, "n": 2}),
        (CompletionRequest, {"prompt_logprobs": 0}),
        (ChatRequest, {"top_logprobs": 3, "logprobs": True}),
        (ChatRequest, {"top_logprobs": 0}),
        (ChatRequest, {"continue_final_message": True, "add_generation_prompt": False}),
    ],
)
def test_parameters_that_do(schema: type[CompletionRequest], body: dict[str, Any]) -> None:
    check_generation(parse(schema, body))


@pytest.mark.parametrize("schema", [CompletionRequest, ChatRequest])
def test_nothing_of_any_size_is_held_while_a_request_is_answered(schema: type[CompletionRequest | ChatRequest]) -> None:
    """Fields whose size no schema bounds are those that are checked by hand."""
    unbounded = {
        name for name, field in schema.model_fields.items() if field.annotation in (Any, dict[str, Any] | None)
    }
    assert {"response_format", "guided_json"} < unbounded
    unbounded.remove("allowed_token_ids")  # `sampling` bounds it, when the prompt is gone
    left = without_input(parse(schema, {"temperature": 0.5} | {name: {"x": 1} for name in unbounded}))
    assert all(getattr(left, name) is None for name in unbounded)
    assert left.temperature == 0.5
