"""Hidden states and input rows on the GPU: behind captured graphs, real copies and a second stream, against plain
transformers in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from runner.messages import FromRunner, LookUp, TokenRows
from runner.token_table import TokenTable
from tests.models import FAMILIES, HIDDEN_SIZE, Family, clear_prompt, embed, hf_hidden, random_prompt
from tests.parity.harness import Harness

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
LENGTHS = (5, 17, 33, 40, 9, 24, 48, 50)
MODES = ("last", "answer", "all", "")
TOKENS = 24


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [16, 64])
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_hidden_states(
    tiny_model: Callable[[Family], Path], family: Family, budget: int, enforce_eager: bool
) -> None:  # fmt: skip
    path = tiny_model(family)
    harness = Harness(
        path, device="cuda", kv_cache_memory_bytes=64 << 20, async_scheduling=True, max_num_batched_tokens=budget,
        enforce_eager=enforce_eager,
    )  # fmt: skip
    prompts = [clear_prompt(path, length, seed=length) for length in LENGTHS]
    numbers = [
        harness.add(embed(path, p) if i % 3 else p, TOKENS, return_hidden_states=MODES[i % 4])
        for i, p in enumerate(prompts)
    ]
    means = [harness.add(p, 0, return_hidden_states="mean") for p in prompts]
    harness.run()
    for i, (number, prompt) in enumerate(zip(numbers, prompts, strict=True)):
        answer, mode = harness.answer(number), MODES[i % 4]
        rows = b"".join(part.rows for part in answer.hidden)
        found = torch.from_numpy(np.frombuffer(rows, np.float32).reshape(-1, HIDDEN_SIZE).copy())
        expected = hf_hidden(path, prompt + answer.tokens[:-1])
        begin = {"last": len(expected) - 1, "answer": len(prompt) - 1, "all": 0, "": len(expected)}[mode]
        torch.testing.assert_close(found, expected[begin:], atol=2e-4, rtol=1e-4)
    for number, prompt in zip(means, prompts, strict=True):
        (part,) = harness.answer(number).hidden
        found = torch.from_numpy(np.frombuffer(part.rows, np.float32).copy())
        torch.testing.assert_close(found, hf_hidden(path, prompt).mean(0), atol=2e-4, rtol=1e-4)
    harness.assert_empty()


def test_look_ups_beside_steps(tiny_model: Callable[[Family], Path]) -> None:
    path = tiny_model("gemma3")
    harness = Harness(path, device="cuda", kv_cache_memory_bytes=64 << 20, async_scheduling=True)
    sent: list[FromRunner] = []
    table = TokenTable(harness.engine.model, 4096, lambda worker, message: sent.append(message))
    asked = {number: random_prompt(1500, number) for number in range(5)}
    generating = [harness.add(clear_prompt(path, 20, seed=1), 60) for _ in range(4)]
    for number, ids in asked.items():
        table.look_up(LookUp(0, number), [memoryview(np.array(ids, np.int32).tobytes())])
    harness.run()
    table._thread.shutdown(wait=True)
    for number, ids in asked.items():
        rows = b"".join(m.rows for m in sent if isinstance(m, TokenRows) and m.request == number)
        found = torch.from_numpy(np.frombuffer(rows, np.float32).reshape(-1, HIDDEN_SIZE).copy())
        assert torch.equal(found, embed(path, ids))
    assert len({tuple(harness.tokens(number)) for number in generating}) == 1
