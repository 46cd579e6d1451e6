"""Every limit of a generation request, in one table, through both routes: at the limit it is served, beyond it there is
a 400 in OpenAI's shape that names the field, and the engine hears nothing of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.answer import MAX_PROMPT_LOGPROBS
from server.conversation import MAX_CONTENT_PARTS, MAX_MESSAGES
from server.inputs import MAX_CHOICES, MAX_PROMPTS
from server.schemas import MAX_DOCUMENTS
from tests.models import EOS_ID, VOCAB_SIZE
from tests.server.fakes import MODEL, Api, api, say

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
TOO_MANY_PARTS = [
    {"role": "user", "content": [{"type": "text", "text": ""}] * count} for count in (MAX_CONTENT_PARTS, 1)
]
USUAL: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": [5, 6]}, CHAT: {"messages": HELLO}}
CONTEXT = MODEL.max_model_len

NAN, INF, HUGE = "\0NaN", "\0Infinity", "\x001e999"
"""Written into the body as they are: no JSON library would."""

# field, what is served, what is refused (the field being the one that the error names)
BOTH: list[tuple[str, list[Any], list[Any]]] = [
    ("temperature", [0, 2, 2.0], [-0.001, 2.001, NAN, INF, HUGE, "1", True]),
    ("top_p", [1e-9, 1], [0, 1.001, -1, NAN, "1"]),
    ("top_k", [-1, 0, 1, VOCAB_SIZE, 10**6], [-2, 1.5, 2**31, "5"]),
    ("min_p", [0, 1], [-0.001, 1.001, NAN]),
    ("presence_penalty", [-2, 2], [-2.001, 2.001, NAN]),
    ("frequency_penalty", [-2, 2], [-2.001, 2.001, INF]),
    ("repetition_penalty", [0.01, 100], [0, -1, 100.1, INF, NAN]),
    ("n", [1, 128], [0, -1, 129, 10**6, 1.0, NAN]),
    ("seed", [-1, -(2**63), 2**63 - 1], [-(2**63) - 1, 2**63, 2**64, 1.5, "1"]),
    ("stop", ["x", ["a"] * 4, [], "x" * 1024], ["", [""], ["a"] * 5, "x" * 1025, [5]]),
    ("stop_token_ids", [[], [0], [VOCAB_SIZE - 1] * 128], [[-1], [VOCAB_SIZE], [2**31], [2**70], [5] * 129, ["5"]]),
    (
        "logit_bias",
        [{}, {"0": -100, str(VOCAB_SIZE - 1): 100}],
        [
            {"-1": 1},
            {str(VOCAB_SIZE): 1},
            {"999999999": 5},
            {"9" * 30: 1},
            {"abc": 1},
            {"5": 100.1},
            {str(each): 0 for each in range(1025)},
        ],
    ),
    (
        "allowed_token_ids",
        [[0], list(range(VOCAB_SIZE))],
        [[], [-1], [VOCAB_SIZE], [2**70], [1.0], [True], "5", {"a": 1}, [0] * (VOCAB_SIZE + 1)],
    ),
    ("bad_words", [["x"], ["x"] * 128, ["x" * 128]], [[""], ["x"] * 129, ["x" * 129], [[5]], "x"]),
    ("prompt_logprobs", [0, 20], [-1, 21, 1.0, True]),
    ("latent_steps", [0, 1, 64], [-1, 1.0, True, 1025, 2**70]),
    ("priority", [0], [2**63, -(2**63) - 1, 0.0, 1, -1]),  # 1: not on this server
    ("cache_salt", ["x" * 128], ["", "x" * 129, "a@b", "a/b", "a\\b", "a\0b"]),
    ("truncate_prompt_tokens", [-1, 1, CONTEXT], [-2, 0, 1.0, "1"]),
    ("truncation_side", ["left", "right"], ["up"]),
    ("min_tokens", [0, 1], [-1, 1.0]),
    ("stream", [False], [1, "true"]),
    ("stream_options", [None], [{}, {"include_usage": True}, "x"]),
    ("ignore_eos", [True], [1]),
    ("model", ["tiny", None], [5]),
    ("return_hidden_states", [False, None], ["", "first", True, 1]),
    ("spaces_between_special_tokens", [True, False], [1]),
]
COMPLETION_ONLY: list[tuple[str, list[Any], list[Any]]] = [
    ("max_tokens", [1, CONTEXT - 2], [0, -1, 2**31, 16.0, "16"]),
    ("logprobs", [0, 20], [-1, 21, True, 1.0]),
    ("best_of", [1, 128], [0, 129, 10**6, 1.0]),
    ("suffix", [None, ""], ["x"]),
    (
        "prompt",
        ["x", ["x", "y"], [0], [VOCAB_SIZE - 1], [[5], [6, 7]], ["x"] * MAX_PROMPTS],
        [
            *([], [""], [[]], [[-1]], [-1], [VOCAB_SIZE], [2**31], [2**70], [True], [1.0], [5, "x"], [[5], "x"]),
            *("", None, 5, {"a": 1}, ["x"] * (MAX_PROMPTS + 1), [[5]] * (MAX_PROMPTS + 1)),
            *("9" * 1000, [5] * CONTEXT, "9" * 10_000_000),
        ],
    ),
]
CHAT_ONLY: list[tuple[str, list[Any], list[Any]]] = [
    ("max_tokens", [1, None], [0, -1, 2**31]),
    ("max_completion_tokens", [1, None], [0, -1, 2**31, 1.0]),
    ("logprobs", [True, False], [1, "true"]),
    ("top_logprobs", [0], [-1, 21, 5, True]),  # 5: without logprobs
    ("messages", [HELLO], [[], None, "x", [5], HELLO * (MAX_MESSAGES + 1), TOO_MANY_PARTS]),
    ("documents", [None, []], ["x", {}, [1], [{}, None], [{"text": "x"}], [{}] * (MAX_DOCUMENTS + 1)]),
    ("chat_template", [None], ["x", "x" * 65537]),
    ("chat_template_kwargs", [{}, {"x": 1}], [{"tokenize": True}, []]),
    ("service_tier", ["auto", "flex"], [5, "x" * 65]),
]
ROWS = [
    *((route, *row) for row in BOTH for route in (COMPLETIONS, CHAT)),
    *((COMPLETIONS, *row) for row in COMPLETION_ONLY),
    *((CHAT, *row) for row in CHAT_ONLY),
]
TOGETHER: list[tuple[str, dict[str, Any], str]] = [
    # what is refused for going together, and the field that the error names
    (COMPLETIONS, {"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    (CHAT, {"min_tokens": 6, "max_completion_tokens": 5, "max_tokens": 9}, "min_tokens"),
    (COMPLETIONS, {"prompt": [5] * 10, "max_tokens": CONTEXT - 9}, "prompt"),
    (CHAT, {"max_tokens": CONTEXT}, "messages"),
    (COMPLETIONS, {"prompt": [5] * 10, "max_tokens": 60, "latent_steps": CONTEXT - 69}, "prompt"),
    (CHAT, {"latent_steps": CONTEXT}, "messages"),
    (COMPLETIONS, {"prompt": ["x"] * 33, "n": 128}, "n"),
    (COMPLETIONS, {"prompt": ["x"] * 33, "best_of": 128}, "best_of"),
    (COMPLETIONS, {"n": 2, "best_of": 1}, "best_of"),
    (COMPLETIONS, {"best_of": 2, "stream": True}, "best_of"),
    (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (COMPLETIONS, {"allowed_token_ids": [EOS_ID], "min_tokens": 1}, "allowed_token_ids"),
    (COMPLETIONS, {"bad_words": [f"{each:0128}" for each in range(16)]}, "bad_words"),
    (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    (
        COMPLETIONS,
        {"prompt": [[5] * (CONTEXT - 1)] * 32, "n": 128, "max_tokens": 1, "prompt_logprobs": 20},
        "prompt_logprobs",
    ),
]


def send(client: Api, route: str, body: dict[str, Any]) -> Any:
    content = json.dumps({"max_tokens": 5, **USUAL[route], **body})
    for raw in (NAN, INF, HUGE):
        content = content.replace(json.dumps(raw), raw[1:])
    return client.post(route, content=content.encode(), headers={"content-type": "application/json"})


@pytest.mark.parametrize(("route", "field", "served", "refused"), ROWS, ids=lambda value: str(value)[:24])
def test_each_limit(route: str, field: str, served: list[Any], refused: list[Any]) -> None:
    with api(say("a")) as (client, engine):
        for value in served:
            response = send(client, route, {field: value})
            assert response.status_code == 200, (value, response.text)
        told = len(engine.submitted)
        for value in refused:
            response = send(client, route, {field: value})
            assert response.status_code == 400, (str(value)[:100], response.text[:300])
            check_error(response, field)
        assert len(engine.submitted) == told


def check_error(response: Any, field: str) -> None:
    assert len(response.content) < 4200
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    if error["code"] == "invalid_json":  # what is no JSON has no fields
        assert error["param"] is None
    else:
        assert error["param"].startswith(field)
        assert field in error["message"] or error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(("route", "body", "field"), TOGETHER, ids=lambda value: str(value)[:40])
def test_what_does_not_go_together(route: str, body: dict[str, Any], field: str) -> None:
    with api(say("a")) as (client, engine):
        response = send(client, route, body)
        assert response.status_code == 400, response.text[:300]
        check_error(response, field)
        assert not engine.submitted


def test_the_table_is_about_the_limits_that_there_are() -> None:
    assert 33 * 128 > MAX_CHOICES >= MAX_PROMPTS
    assert (CONTEXT - 1) * 32 * 128 * 21 > MAX_PROMPT_LOGPROBS


def test_no_tokens_are_asked_for_only_to_score_a_prompt() -> None:
    with api(say("a")) as (client, _):
        assert send(client, COMPLETIONS, {"max_tokens": 0, "echo": True}).status_code == 200
