"""PEFT's own adapters over the tiny models, saved as PEFT saves them, and PEFT's own answers: the reference for soft
prompts."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftModel, PromptEncoderConfig, PromptTuningConfig, TaskType, get_peft_model
from transformers import AutoModelForCausalLM

from tests.models import PAD_ID

Adapter = Literal["prompt-tuning", "p-tuning MLP", "p-tuning LSTM"]
ADAPTERS: tuple[Adapter, ...] = ("prompt-tuning", "p-tuning MLP", "p-tuning LSTM")


def save_adapter(model: Path, folder: Path, kind: Adapter, rows: int, *, seed: int = 0) -> Path:
    """An untrained adapter, whose rows are about as long as those of the model's own table; returns `folder`."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.random.fork_rng(), _quietly():
        torch.manual_seed(seed)
        adapted = get_peft_model(base, _config(kind, rows))
        with torch.no_grad():
            for parameter in adapted.prompt_encoder.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.5)
        adapted.save_pretrained(folder)
    return folder


def _config(kind: Adapter, rows: int) -> Any:
    if kind == "prompt-tuning":
        return PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=rows)
    return PromptEncoderConfig(
        task_type=TaskType.CAUSAL_LM,
        num_virtual_tokens=rows,
        encoder_hidden_size=32,
        encoder_reparameterization_type=kind.removeprefix("p-tuning "),
    )


@torch.inference_mode()
def peft_generate(model: Path, adapter: Path, ids: Sequence[int], max_new_tokens: int = 32) -> list[int]:
    """PEFT's greedy tokens behind `ids`."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    prompt = torch.tensor([list(ids)])
    with _quietly():
        adapted = PeftModel.from_pretrained(base, adapter).eval()
        output = adapted.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=None,
            pad_token_id=PAD_ID,
            # With a cache, PEFT 0.21 under transformers 5.24 puts the rows before every new token as well: it looks for
            # the cache under its older name.
            use_cache=False,
        )
    return [int(token) for token in output[0, len(ids) :]]


@contextmanager
def _quietly() -> Iterator[None]:
    """PEFT uses what transformers is about to take away, and says at every token that it ignores position ids."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
