"""The parity promise on the GPU: Triton kernels, pinned copies and real asynchrony in place of their CPU stand-ins.

float32 must match Hugging Face's greedy tokens exactly (no TF32 anywhere). bfloat16 is compared with itself: the same
prompt as ids and as embeddings, in batches of the same shape, must give the same tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLMatcher
from transformers import AutoTokenizer

from tests.models import EOS_ID, FAMILIES, Family, clear_prompt, embed, hf_generate
from tests.parity.harness import Harness

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
LENGTHS = (5, 17, 33, 40, 9, 24, 48, 50)
TOKENS = 32


def gpu_harness(path: Path, **options: Any) -> Harness:
    return Harness(path, **{"device": "cuda", "kv_cache_memory_bytes": 64 << 20, **options})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("budget", [16, 64])
@pytest.mark.parametrize(
    ("kind", "enforce_eager"), [("ids", False), ("embeds", False), ("both", False), ("both", True)]
)
def test_float32_parity(
    tiny_model: Callable[[Family], Path], family: Family, async_scheduling: bool, budget: int, kind: str,
    enforce_eager: bool,
) -> None:  # fmt: skip
    path = tiny_model(family)
    prompts = [clear_prompt(path, length, seed=length) for length in LENGTHS]
    harness = gpu_harness(
        path, async_scheduling=async_scheduling, max_num_batched_tokens=budget, enforce_eager=enforce_eager
    )
    as_rows = {"ids": (), "embeds": range(len(prompts)), "both": range(0, len(prompts), 2)}[kind]
    numbers = [harness.add(embed(path, p) if i in as_rows else p, TOKENS) for i, p in enumerate(prompts)]
    harness.run()
    for number, prompt in zip(numbers, prompts, strict=True):
        assert harness.tokens(number) == hf_generate(path, prompt, TOKENS, ignore_eos=True)
    harness.assert_empty()


@pytest.mark.parametrize("family", FAMILIES)
def test_preemption_and_prefix_cache(tiny_model: Callable[[Family], Path], family: Family) -> None:
    path = tiny_model(family)
    prompts = [clear_prompt(path, length, seed=length) for length in LENGTHS]
    harness = Harness(path, device="cuda", num_blocks=14, max_num_batched_tokens=16, async_scheduling=True)
    for _ in range(2):
        numbers = [harness.add(embed(path, p) if i % 2 else p, TOKENS) for i, p in enumerate(prompts)]
        harness.run()
        for number, prompt in zip(numbers, prompts, strict=True):
            assert harness.tokens(number) == hf_generate(path, prompt, TOKENS, ignore_eos=True)
    assert harness.engine.stats().preemptions > 0
    assert harness.engine.stats().prefix_hits > 0
    harness.assert_empty()


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_ids_and_embeddings_agree(tiny_model: Callable[[Family], Path], family: Family) -> None:
    path = tiny_model(family)
    prompts = [clear_prompt(path, length, seed=length) for length in LENGTHS]

    def run(rows: bool) -> list[list[int]]:
        harness = gpu_harness(path, dtype="bfloat16", enable_prefix_caching=False)
        table = harness.engine.model.embed
        pieces = [table(torch.tensor(p, device="cuda")).cpu() if rows else p for p in prompts]
        numbers = [harness.add(piece, TOKENS) for piece in pieces]
        harness.run()
        return [harness.tokens(number) for number in numbers]

    assert run(rows=True) == run(rows=False)


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"presence_penalty": 0.5}, {"logprobs": 2}], ids=str)
def test_grammars(tiny_model: Callable[[Family], Path], options: dict[str, Any], enforce_eager: bool) -> None:
    """Masks reach the logits before whatever samples them, a captured graph too; neighbours stay the reference's. Many
    steps, so that every staging buffer comes round several times while another step is in flight."""
    path = tiny_model("llama")
    decode = AutoTokenizer.from_pretrained(path).decode
    harness = gpu_harness(path, async_scheduling=True, max_num_batched_tokens=64, enforce_eager=enforce_eager)
    prompts = [clear_prompt(path, length, seed=length) for length in LENGTHS]
    plain = [harness.add(prompt, TOKENS) for prompt in prompts]
    patterns = [f"({'abcdefgh'[i]}[0-9]){{6,9}}!" for i in range(6)]
    sampling: dict[str, Any] = {"temperature": 1.0, "stop_token_ids": (EOS_ID,), **options}
    bound = [
        harness.add(prompts[i], 40, seed=i, grammar=LLMatcher.grammar_from_regex(pattern), **sampling)
        for i, pattern in enumerate(patterns)
    ]
    harness.run()
    for number, prompt in zip(plain, prompts, strict=True):
        assert harness.tokens(number) == hf_generate(path, prompt, TOKENS, ignore_eos=True)
    for number, pattern in zip(bound, patterns, strict=True):
        assert re.fullmatch(pattern, decode(harness.tokens(number), skip_special_tokens=True))
    harness.assert_empty()


def test_sampling_is_the_same_as_on_the_cpu(tiny_model: Callable[[Family], Path]) -> None:
    """The noise is a hash: the same seed draws the same tokens on either device."""
    path = tiny_model("llama")
    prompts = [clear_prompt(path, length, seed=length) for length in LENGTHS]
    options: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "presence_penalty": 0.5, "logprobs": 2}

    def run(device: str) -> list[list[int]]:
        harness = Harness(path, device=device, kv_cache_memory_bytes=64 << 20)
        numbers = [harness.add(p, TOKENS, seed=7 + i, **options) for i, p in enumerate(prompts)]
        harness.run()
        return [harness.tokens(number) for number in numbers]

    assert run("cuda") == run("cpu")


def test_prompts_beside_decodes_are_paced_by_what_the_graphs_take(tiny_model: Callable[[Family], Path]) -> None:
    for max_num_seqs, beside in ((64, 32), (8, 7)):
        scheduler = gpu_harness(
            tiny_model("llama"), max_num_batched_tokens=512, max_num_seqs=max_num_seqs
        ).engine.scheduler
        assert scheduler.pace.least + beside in scheduler.padded_sizes and scheduler.pace.least <= scheduler.pace.most
    fixed = gpu_harness(tiny_model("llama"), chunked_prefill_size=100).engine.scheduler.pace
    assert fixed.least == fixed.most == 100
