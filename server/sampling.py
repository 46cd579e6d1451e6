"""A request's sampling parameters: the client's values over the model's defaults over neutral ones."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from runner.messages import ModelInfo, SamplingParams
from server.errors import ContextLengthExceeded, InvalidRequest
from server.hidden_states import asked_of_runner
from server.schemas import INT64_MIN, ChatRequest, CompletionRequest, GenerationRequest

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for completions. (Chat answers may fill the context.)"""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What the model's generation_config.json says."""

    eos_token_ids: tuple[int, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def load(
        cls, model_folder: Path, source: str = "auto", *, vocab_size: int, tokenizer_eos: int | None = None
    ) -> GenerationDefaults:
        """`source`: "auto" takes the model's own sampling values, "none" neutral ones, anything else is a folder to
        take them from. What ends generation is the model's in every case.

        Raises ValueError for a folder without a readable generation_config.json.
        """
        own = _read_json(model_folder / "generation_config.json")
        eos = own.get("eos_token_id")
        if eos is None:
            eos = _read_json(model_folder / "config.json").get("eos_token_id", tokenizer_eos)
        candidates: list[Any] = eos if isinstance(eos, list) else [eos]
        ids = tuple(dict.fromkeys(int(each) for each in candidates if _is_index(each, vocab_size)))
        if source in ("none", "vllm"):
            return cls(ids)
        values = own if source == "auto" else _read_json(Path(source) / "generation_config.json", required=True)
        return cls(ids, **_sampling_values(values))


def _sampling_values(config: dict[str, Any]) -> dict[str, Any]:
    """The values that a generation config sets, where they are within the limits that a client has too."""
    values: dict[str, Any] = {}
    for name, low, high in (
        ("temperature", 0.0, 2.0),
        ("top_p", 1e-9, 1.0),
        ("min_p", 0.0, 1.0),
        ("repetition_penalty", 1e-9, 100.0),
    ):
        value = config.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high:
            values[name] = float(value)
    if _is_index(config.get("top_k"), 2**31):
        values["top_k"] = config["top_k"]
    return values


def _read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        if required:
            raise ValueError(f"--generation-config: cannot read {path}: {type(error).__name__}") from None
        return {}
    return value if isinstance(value, dict) else {}


def _is_index(value: Any, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < limit


def common_params(request: GenerationRequest, model: ModelInfo, defaults: GenerationDefaults) -> SamplingParams:
    """What all prompts of a request share, but for `bad_words`, which take a tokenizer; `params_for_prompt` adds the
    rest. Raises InvalidRequest for ids outside of the vocabulary."""
    stop_ids = () if request.ignore_eos else defaults.eos_token_ids
    stop_ids += tuple(_in_vocabulary(request.stop_token_ids or [], "stop_token_ids", model.vocab_size))
    top_k = defaults.top_k if request.top_k is None else request.top_k
    return SamplingParams(
        max_tokens=0,
        min_tokens=request.min_tokens or 0,
        temperature=_or(request.temperature, defaults.temperature),
        top_p=_or(request.top_p, defaults.top_p),
        top_k=max(top_k, 0),
        min_p=_or(request.min_p, defaults.min_p),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        repetition_penalty=_or(request.repetition_penalty, defaults.repetition_penalty),
        logit_bias=_logit_bias(request.logit_bias or {}, model.vocab_size),
        stop_token_ids=tuple(dict.fromkeys(stop_ids)),
        logprobs=_num_logprobs(request),
        allowed_token_ids=_allowed(request, stop_ids, model.vocab_size),
        return_hidden_states=asked_of_runner(request),
        latent_steps=request.latent_steps or 0,
    )


def params_for_prompt(
    common: SamplingParams, request: GenerationRequest, *, prompt_tokens: int, max_model_len: int, param: str
) -> SamplingParams:
    """`param`: the field that a prompt which does not fit is blamed on.

    Raises ContextLengthExceeded, and InvalidRequest for contradictory lengths.
    """
    max_tokens = _max_tokens(request, prompt_tokens, max_model_len, param)
    if common.min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens must be at most max_tokens ({max_tokens}).", param="min_tokens")
    return msgspec.structs.replace(
        common,
        max_tokens=max_tokens,
        seed=_seed(request.seed),
        prompt_logprobs=_num_prompt_logprobs(request, max_tokens),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)


def _max_tokens(request: GenerationRequest, prompt_tokens: int, context: int, param: str) -> int:
    asked, name = request.max_tokens, "max_tokens"
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        asked, name = request.max_completion_tokens, "max_completion_tokens"
    scoring = isinstance(request, CompletionRequest) and bool(request.echo)
    if asked == 0 and not scoring and request.return_hidden_states is None:
        names = "echo or return_hidden_states" if isinstance(request, CompletionRequest) else "return_hidden_states"
        least = f"1 (0 is only allowed with {names})"
        raise InvalidRequest(f"{name} must be at least {least}.", param=name)
    latent = request.latent_steps or 0
    room = context - prompt_tokens - latent
    between = f", {latent} in latent_steps" if latent else ""
    if room < (0 if asked == 0 else 1):
        raise ContextLengthExceeded(
            f"This model's maximum context length is {context} tokens. However, your {param} resulted in"
            f" {prompt_tokens} tokens{between}. Please reduce the length of the {param}.",
            param=param,
        )
    if asked is None:
        return min(room, COMPLETION_MAX_TOKENS) if isinstance(request, CompletionRequest) else room
    if asked > room:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {context} tokens. However, you requested"
            f" {prompt_tokens + latent + asked} tokens ({prompt_tokens} in the {param}{between}, {asked} in {name})."
            f" Please reduce the length of the {param} or {name}.",
            param=param,
        )
    return asked


def _seed(seed: int | None) -> int:
    if seed is None or seed == -1:
        return secrets.randbits(64) + INT64_MIN
    return seed


def _in_vocabulary(ids: list[int], field: str, vocab_size: int) -> list[int]:
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise InvalidRequest(f"{field} must be token ids from 0 to {vocab_size - 1}.", param=field)
    return ids


def _allowed(request: GenerationRequest, stop_ids: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    ids = request.allowed_token_ids
    if ids is None:
        return ()
    if not isinstance(ids, list) or not ids or set(map(type, ids)) != {int}:
        raise InvalidRequest("allowed_token_ids must be a list of token ids, not empty.", param="allowed_token_ids")
    if len(ids) > vocab_size:
        raise InvalidRequest(f"allowed_token_ids must have at most {vocab_size} ids.", param="allowed_token_ids")
    allowed = tuple(dict.fromkeys(_in_vocabulary(ids, "allowed_token_ids", vocab_size)))
    if request.min_tokens and set(allowed) <= set(stop_ids):
        raise InvalidRequest(
            "allowed_token_ids has only tokens that end the answer, and min_tokens forbids these.",
            param="allowed_token_ids",
        )
    return allowed


def _logit_bias(bias: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    if not all(key.isascii() and key.isdecimal() and len(key) <= 10 for key in bias):
        raise InvalidRequest("logit_bias must have token ids as keys.", param="logit_bias")
    ids = _in_vocabulary([int(key) for key in bias], "logit_bias", vocab_size)
    # As a dict once more: "7" and "07" are the same token.
    return tuple(dict(zip(ids, map(float, bias.values()), strict=True)).items())


def _num_logprobs(request: GenerationRequest) -> int | None:
    if isinstance(request, ChatRequest):
        return (request.top_logprobs or 0) if request.logprobs else None
    if not isinstance(request, CompletionRequest):
        return None
    if request.logprobs is None and request.num_made > (request.n or 1):
        return 0  # what choices are ranked by
    return request.logprobs


def _num_prompt_logprobs(request: GenerationRequest, max_tokens: int) -> int | None:
    """As many as the prompt's own field or an echo asks for. A request for no tokens at all is a scoring request,
    wanted or not."""
    asked = [request.prompt_logprobs]
    if isinstance(request, CompletionRequest) and request.echo:
        asked += [request.logprobs, 0 if max_tokens == 0 else None]
    return max((number for number in asked if number is not None), default=None)
