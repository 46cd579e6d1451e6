"""More rows than there are blocks for: requests lose their blocks, are computed again, and say the same."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.faults.faulty_server import BLOCKS, SLOTS, FaultyServer
from tests.models import MAX_POSITIONS, clear_prompt, hf_generate
from tests.server.harness import eventually

LENGTH, TOKENS = 170, 40


def complete(server: FaultyServer, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """The answers' ids."""
    body = {"model": "m", "prompt": prompts, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    answer = httpx.post(f"{server.base}/v1/completions", json=body | {"return_token_ids": True}, timeout=100)
    assert answer.status_code == 200, answer.text
    return [choice["token_ids"] for choice in answer.json()["choices"]]


def preemptions(server: FaultyServer) -> float:
    with server.client() as client:
        lines = client.get("/metrics").text.splitlines()
    (value,) = [line.split()[-1] for line in lines if line.startswith("intarsia:num_preemptions_total")]
    return float(value)


def test_a_pool_that_is_exhausted(faulty: FaultyServer, llama: Path, long_run: bool) -> None:
    """In one request, lest they come one after another."""
    count = 24 if long_run else SLOTS
    assert SLOTS * (LENGTH + TOKENS) > 2 * 16 * BLOCKS
    prompts = [clear_prompt(llama, LENGTH, seed, TOKENS) for seed in range(count)]
    before = preemptions(faulty)
    answers = complete(faulty, prompts, TOKENS)
    assert answers == [hf_generate(llama, prompt, TOKENS) for prompt in prompts]
    eventually(lambda: preemptions(faulty) > before)  # the engine tells of them a little later
    faulty.assert_well()


def test_one_request_as_long_as_the_context(faulty: FaultyServer, llama: Path) -> None:
    prompt = [4 + index % 300 for index in range(MAX_POSITIONS - 4)]
    with ThreadPoolExecutor(SLOTS) as pool:
        around = [pool.submit(complete, faulty, [[5 + number] * 60], 30) for number in range(SLOTS)]
        assert [len(ids) for ids in complete(faulty, [prompt], 4)] == [4]
        assert all(len(ids) == 30 for each in around for ids in each.result())
    faulty.assert_well()
