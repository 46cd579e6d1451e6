"""Requests to sampling parameters: defaults, limits that depend on the model, and lengths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runner.messages import SamplingParams
from server.errors import ContextLengthExceeded, InvalidRequest
from server.sampling import GenerationDefaults, common_params, params_for_prompt
from server.schemas import ChatRequest, CompletionRequest, parse
from tests.models import EOS_ID, VOCAB_SIZE
from tests.server.fakes import MODEL

CONTEXT = MODEL.max_model_len
DEFAULTS = GenerationDefaults(eos_token_ids=(EOS_ID, 9))


def params(
    body: dict[str, Any], *, chat: bool = False, prompt: int = 10, defaults: GenerationDefaults = DEFAULTS
) -> SamplingParams:
    request = parse(ChatRequest if chat else CompletionRequest, body)
    common = common_params(request, MODEL, defaults)
    param = "messages" if chat else "prompt"
    return params_for_prompt(common, request, prompt_tokens=prompt, max_model_len=CONTEXT, param=param)


def test_neutral_values() -> None:
    found = params({"seed": 7})
    assert found == SamplingParams(max_tokens=16, stop_token_ids=(EOS_ID, 9), seed=7)


def test_every_value_arrives() -> None:
    given = {
        "max_tokens": 20,
        "min_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.25,
        "repetition_penalty": 1.5,
        "seed": -5,
        "logprobs": 3,
    }
    found = params({**given, "logit_bias": {"5": 1, "6": -1.5}, "stop_token_ids": [7, 9]})
    assert {name: getattr(found, name) for name in given} == given
    assert found.logit_bias == ((5, 1.0), (6, -1.5))
    assert found.stop_token_ids == (EOS_ID, 9, 7)
    assert found.prompt_logprobs is None
    # What the other side decodes has the declared types.
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=SamplingParams) == found


def test_the_models_defaults_give_way_to_the_clients() -> None:
    defaults = GenerationDefaults((), temperature=0.6, top_p=0.9, top_k=20, min_p=0.05, repetition_penalty=1.1)
    found = params({}, defaults=defaults)
    assert (found.temperature, found.top_p, found.top_k, found.min_p, found.repetition_penalty) == (
        0.6,
        0.9,
        20,
        0.05,
        1.1,
    )
    asked = params({"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}, defaults=defaults)
    assert (asked.temperature, asked.top_p, asked.top_k, asked.min_p, asked.repetition_penalty) == (0, 1, 0, 0, 1)


def test_ignore_eos_keeps_the_clients_own() -> None:
    assert params({"ignore_eos": True, "stop_token_ids": [7]}).stop_token_ids == (7,)


@pytest.mark.parametrize("seed", [None, -1])
def test_a_seed_is_drawn_for_each_prompt(seed: int | None) -> None:
    seeds = {params({"seed": seed}).seed for _ in range(64)}
    assert len(seeds) == 64
    assert all(-(2**63) <= drawn < 2**63 for drawn in seeds)
    assert min(seeds) < 0 < max(seeds)
    assert max(map(abs, seeds)) > 2**60


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [2**70]}, "stop_token_ids"),
        ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
        ({"logit_bias": {"999999999": 5}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"": 1}}, "logit_bias"),
        ({"logit_bias": {"1.0": 1}}, "logit_bias"),
        ({"logit_bias": {"٣": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ],
)
def test_ids_outside_of_the_vocabulary(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        params(body)
    assert caught.value.param == param
    assert len(caught.value.message) < 200


def test_the_last_id_is_inside() -> None:
    assert params({"logit_bias": {str(VOCAB_SIZE - 1): 1}}).logit_bias == ((VOCAB_SIZE - 1, 1.0),)


def test_two_spellings_of_an_id_are_one() -> None:
    assert params({"logit_bias": {"7": 1, "07": 2}}).logit_bias == ((7, 2.0),)


def test_how_many_tokens() -> None:
    assert params({"max_tokens": None}).max_tokens == 16
    assert params({}, prompt=CONTEXT - 5).max_tokens == 5
    assert params({}, chat=True).max_tokens == CONTEXT - 10
    assert params({"max_tokens": 5}, chat=True).max_tokens == 5
    assert params({"max_tokens": 5, "max_completion_tokens": 6}, chat=True).max_tokens == 6
    assert params({"max_tokens": CONTEXT - 10}).max_tokens == CONTEXT - 10


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    ("body", "prompt"),
    [({}, CONTEXT), ({}, CONTEXT * 60), ({"max_tokens": CONTEXT}, 10), ({"max_tokens": 6}, CONTEXT - 5)],
)
def test_what_does_not_fit(body: dict[str, Any], prompt: int, chat: bool) -> None:
    with pytest.raises(ContextLengthExceeded, match=f"{CONTEXT} tokens") as caught:
        params(body, prompt=prompt, chat=chat)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == ("messages" if chat else "prompt")
    assert str(prompt) in caught.value.message
    assert "-" not in caught.value.message  # no negative number of tokens


@pytest.mark.parametrize(
    ("chat", "name"), [(False, "max_tokens"), (True, "max_tokens"), (True, "max_completion_tokens")]
)
def test_no_tokens_at_all(chat: bool, name: str) -> None:
    with pytest.raises(InvalidRequest, match="at least 1") as caught:
        params({name: 0}, chat=chat)
    assert caught.value.param == name


def test_scoring() -> None:
    assert params({"echo": True, "max_tokens": 0}, prompt=CONTEXT).max_tokens == 0
    assert params({"echo": True, "max_tokens": 0}).prompt_logprobs == 0
    assert params({"echo": True, "max_tokens": 0, "logprobs": 4}).prompt_logprobs == 4
    assert params({"echo": True, "logprobs": 4}).prompt_logprobs == 4
    assert params({"echo": True}).prompt_logprobs is None
    with pytest.raises(ContextLengthExceeded):
        params({"echo": True, "max_tokens": 0}, prompt=CONTEXT + 1)


def test_min_tokens_beyond_max_tokens() -> None:
    assert params({"min_tokens": 5, "max_tokens": 5}).min_tokens == 5
    with pytest.raises(InvalidRequest) as caught:
        params({"min_tokens": 6, "max_tokens": 5})
    assert caught.value.param == "min_tokens"


def test_logprobs_in_chat() -> None:
    assert params({}, chat=True).logprobs is None
    assert params({"logprobs": True}, chat=True).logprobs == 0
    assert params({"logprobs": True, "top_logprobs": 4}, chat=True).logprobs == 4
    assert params({"logprobs": 0}).logprobs == 0


# --- the model's generation config ------------------------------------------------------------------------------------


def load(folder: Path, source: str = "auto", tokenizer_eos: int | None = None, **config: Any) -> GenerationDefaults:
    (folder / "generation_config.json").write_text(json.dumps(config))
    return GenerationDefaults.load(folder, source, vocab_size=100, tokenizer_eos=tokenizer_eos)


def test_all_end_tokens_are_taken(tmp_path: Path) -> None:
    assert load(tmp_path, eos_token_id=[5, 6, 5]).eos_token_ids == (5, 6)
    assert load(tmp_path, eos_token_id=5).eos_token_ids == (5,)
    assert load(tmp_path, eos_token_id=[5, 100, -1, True, "7"]).eos_token_ids == (5,)


def test_end_tokens_from_elsewhere(tmp_path: Path) -> None:
    assert load(tmp_path, tokenizer_eos=8).eos_token_ids == (8,)
    (tmp_path / "config.json").write_text('{"eos_token_id": [3, 4]}')
    assert load(tmp_path, tokenizer_eos=8).eos_token_ids == (3, 4)
    (tmp_path / "generation_config.json").unlink()
    assert GenerationDefaults.load(tmp_path, vocab_size=100).eos_token_ids == (3, 4)


def test_sampling_values(tmp_path: Path) -> None:
    values: dict[str, Any] = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.05}
    found = load(tmp_path, eos_token_id=1, max_new_tokens=5, **values)
    assert found == GenerationDefaults((1,), **values)
    assert load(tmp_path, "none", eos_token_id=1, **values) == GenerationDefaults((1,))


def test_values_beyond_a_clients_limits_are_dropped(tmp_path: Path) -> None:
    found = load(tmp_path, temperature=None, top_p=0.0, top_k=-1, min_p=2, repetition_penalty="1")
    assert found == GenerationDefaults()


def test_another_folders_values(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"temperature": 0.3, "eos_token_id": 50}')
    found = load(tmp_path, str(other), eos_token_id=1, temperature=0.9)
    assert found == GenerationDefaults((1,), temperature=0.3)
    with pytest.raises(ValueError, match="--generation-config"):
        load(tmp_path, str(tmp_path / "missing"))
