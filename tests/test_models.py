"""The tiny models can notice a mistake, and the reference agrees with itself. Without this the parity tests would
prove nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tests import models
from tests.models import FAMILIES, Family

TinyModel = Callable[[Family], Path]

every_family = pytest.mark.parametrize("family", FAMILIES)


@every_family
def test_greedy_output_is_varied(tiny_model: TinyModel, family: Family) -> None:
    for seed in range(4):
        output = models.hf_generate(tiny_model(family), models.random_prompt(20, seed))
        assert len(output) == 32
        assert len(set(output)) >= 8


@every_family
def test_every_prompt_row_matters(tiny_model: TinyModel, family: Family) -> None:
    """One row changed, be it outside of every sliding window, and other tokens follow."""
    path = tiny_model(family)
    prompt = models.random_prompt(24, seed=1)
    output = models.hf_generate(path, prompt)
    for row in range(len(prompt)):
        changed = list(prompt)
        changed[row] = models.random_prompt(1, seed=100 + row)[0]
        assert changed != prompt
        assert models.hf_generate(path, changed) != output, f"row {row} goes unnoticed"


@every_family
def test_positions_matter(tiny_model: TinyModel, family: Family) -> None:
    """Two rows swapped, which a model without position encoding would not see."""
    path = tiny_model(family)
    prompt = models.random_prompt(24, seed=2)
    swapped = [prompt[1], prompt[0], *prompt[2:]]
    assert models.hf_generate(path, swapped) != models.hf_generate(path, prompt)


@every_family
def test_rows_say_what_ids_say(tiny_model: TinyModel, family: Family) -> None:
    path = tiny_model(family)
    prompt = models.random_prompt(24, seed=3)
    rows = models.embed(path, prompt)
    assert rows.shape == (24, models.HIDDEN_SIZE)
    assert rows.dtype == torch.float32
    assert models.hf_generate(path, rows) == models.hf_generate(path, prompt)
    torch.testing.assert_close(models.hf_logits(path, rows), models.hf_logits(path, prompt))


@every_family
def test_clear_prompts_have_no_near_tie(tiny_model: TinyModel, family: Family) -> None:
    path = tiny_model(family)
    prompt = models.clear_prompt(path, 24, seed=4)
    output = models.hf_generate(path, prompt)
    top = models.hf_logits(path, prompt + output)[23:-1].topk(2)
    assert top.indices[:, 0].tolist() == output
    assert (top.values[:, 0] - top.values[:, 1]).min() > models.TIE


@every_family
def test_building_is_deterministic(tiny_model: TinyModel, family: Family, tmp_path: Path) -> None:
    again = models.build_tiny_model(family, tmp_path)
    for file in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (again / file).read_bytes() == (tiny_model(family) / file).read_bytes(), file


def test_ending_token_ends_only_when_asked(tiny_model: TinyModel) -> None:
    path = tiny_model("llama")
    model = models.hf_model(path)
    prompt = models.random_prompt(20, seed=0)
    output = models.hf_generate(path, prompt)
    ending = output[10]
    saved = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = ending
    try:
        assert models.hf_generate(path, prompt) == output
        assert models.hf_generate(path, prompt, ignore_eos=False) == output[: output.index(ending) + 1]
    finally:
        model.generation_config.eos_token_id = saved


def test_every_id_has_a_text(tiny_model: TinyModel) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model("llama"))
    assert len(tokenizer) == models.VOCAB_SIZE
    assert all(tokenizer.convert_ids_to_tokens(token) for token in range(models.VOCAB_SIZE))


def test_tokenizer_round_trips_any_text(tiny_model: TinyModel) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model("llama"))
    text = "  Où est la tête ? 漢字 🧩🏽 \n\tnaïve ."
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_chat_template_is_in_the_folder(tiny_model: TinyModel) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model("llama"))
    chat = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<bos><turn>user\nHi<eos>\n<turn>assistant\n"
