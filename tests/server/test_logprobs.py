"""Log-probabilities in both shapes."""

from __future__ import annotations

import math

import pytest
from openai.types.chat.chat_completion import ChoiceLogprobs
from openai.types.completion_choice import Logprobs

from runner.messages import TokenLogprobs
from server.choices import TokenRecord
from server.logprobs import LOWEST, LogprobFormat
from tests.models import EOS_ID
from tests.server.fakes import byte_ids, ids_of, tokenizer

FORMAT = LogprobFormat(tokenizer().vocabulary)
AS_IDS = LogprobFormat(tokenizer().vocabulary, as_token_ids=True)
(A,), (B,) = ids_of("a"), ids_of("b")
HALF = byte_ids("é".encode())[0]


def record(token: int, logprob: float = -1.0, top: dict[int, float] | None = None, offset: int = 0) -> TokenRecord:
    top = top or {}
    return TokenRecord(token, TokenLogprobs(token, logprob, 1, tuple(top), tuple(top.values())), offset)


def test_completion() -> None:
    body = FORMAT.completion([TokenRecord(A, None, 0), record(B, -1.0, {A: -0.5, B: -1.0}, 1)])
    assert body == {
        "tokens": ["a", "b"],
        "token_logprobs": [None, -1.0],
        "top_logprobs": [None, {"b": -1.0, "a": -0.5}],
        "text_offset": [0, 1],
    }
    Logprobs.model_validate(FORMAT.completion([record(B, -1.0, {A: -0.5})]), strict=True)


def test_completion_with_none_asked_has_the_tokens_own() -> None:
    assert FORMAT.completion([record(A, -1.5)])["top_logprobs"] == [{"a": -1.5}]


def test_the_sampled_token_is_there_beside_the_best() -> None:
    assert FORMAT.completion([record(A, -9.0, {B: -0.1})])["top_logprobs"] == [{"a": -9.0, "b": -0.1}]


def test_chat() -> None:
    body = FORMAT.chat([record(A, -1.0, {B: -0.5})])
    assert body["content"] == [
        {"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": [{"token": "b", "logprob": -0.5, "bytes": [98]}]}
    ]
    ChoiceLogprobs.model_validate(body, strict=True)


def test_half_a_character_has_bytes_and_no_replacement() -> None:
    (entry,) = FORMAT.chat([record(HALF)])["content"]
    assert (entry["token"], entry["bytes"]) == ("\\xc3", [0xC3])
    assert FORMAT.completion([record(HALF)])["tokens"] == ["bytes:\\xc3"]


def test_special_tokens_have_their_names() -> None:
    assert FORMAT.chat([record(EOS_ID)])["content"][0]["token"] == "<eos>"


def test_as_token_ids() -> None:
    assert AS_IDS.completion([record(A, -1.0, {B: -0.5})])["tokens"] == [f"token_id:{A}"]
    assert AS_IDS.completion([record(A, -1.0, {B: -0.5})])["top_logprobs"] == [
        {f"token_id:{A}": -1.0, f"token_id:{B}": -0.5}
    ]
    assert AS_IDS.chat([record(A)])["content"][0]["token"] == f"token_id:{A}"


def test_of_two_ids_with_one_text_the_more_probable() -> None:
    unknown = 10**6  # both are empty
    (top,) = FORMAT.completion([record(unknown, -3.0, {unknown + 1: -0.5, unknown + 2: -7.0})])["top_logprobs"]
    assert top == {"": -0.5}


@pytest.mark.parametrize("value", [-math.inf, math.nan, -1e30])
def test_numbers_that_json_does_not_have(value: float) -> None:
    body = FORMAT.completion([record(A, value, {B: value})])
    assert body["token_logprobs"] == [LOWEST]
    assert body["top_logprobs"] == [{"a": LOWEST, "b": LOWEST}]
    assert FORMAT.chat([record(A, value)])["content"][0]["logprob"] == LOWEST
