"""More rows than there are blocks for: requests lose their blocks, are computed again, and say the same."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.faults.faulty_server import BLOCKS, SLOTS, FaultyServer
from tests.models import MAX_POSITIONS, clear_prompt, hf_generate

LENGTH, TOKENS = 170, 40


def complete(server: FaultyServer, prompt: list[int], tokens: int) -> list[int]:
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    answer = httpx.post(f"{server.base}/v1/completions", json=body | {"return_token_ids": True}, timeout=100)
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


def preemptions(server: FaultyServer) -> float:
    with server.client() as client:
        lines = client.get("/metrics").text.splitlines()
    (value,) = [line.split()[-1] for line in lines if line.startswith("intarsia:num_preemptions_total")]
    return float(value)


def test_a_pool_that_is_exhausted(faulty: FaultyServer, llama: Path, long_run: bool) -> None:
    count = 24 if long_run else SLOTS
    assert SLOTS * (LENGTH + TOKENS) > 2 * 16 * BLOCKS
    prompts = [clear_prompt(llama, LENGTH, seed, TOKENS) for seed in range(count)]
    before = preemptions(faulty)
    with ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(lambda prompt: complete(faulty, prompt, TOKENS), prompts))
    assert answers == [hf_generate(llama, prompt, TOKENS) for prompt in prompts]
    assert preemptions(faulty) > before
    faulty.assert_well()


def test_one_request_as_long_as_the_context(faulty: FaultyServer, llama: Path) -> None:
    prompt = [4 + index % 300 for index in range(MAX_POSITIONS - 4)]
    with ThreadPoolExecutor(SLOTS) as pool:
        around = [pool.submit(complete, faulty, [5 + number] * 60, 30) for number in range(SLOTS)]
        assert len(complete(faulty, prompt, 4)) == 4
        assert all(len(each.result()) == 30 for each in around)
    faulty.assert_well()
