"""Soft prompts of a real server answer as PEFT does with the same adapter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoTokenizer

from tests.integration.real_server import RealServer
from tests.integration.test_answers import greedy
from tests.models import TIE, embed, hf_generate, hf_logits, random_prompt
from tests.peft_adapters import ADAPTERS, peft_generate, save_adapter

TOKENS = 24
ROWS = 20
NAMES = {kind: kind.replace(" ", "-") for kind in ADAPTERS}


@pytest.fixture(scope="module")
def adapters(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: save_adapter(llama, folder / name, kind, ROWS) for kind, name in NAMES.items()}


@pytest.fixture(scope="module")
def soft(llama: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    given = [[name, str(path)] for name, path in adapters.items()]
    given.append(["bare", str(next(iter(adapters.values())) / "adapter_model.safetensors")])
    folder = tmp_path_factory.mktemp("soft")
    options: dict[str, Any] = {"dtype": "float32", "debug_checks": True, "async_scheduling": True}
    with RealServer(folder, llama, soft_prompts=given, **options) as server:
        yield server.wait_ready()


def rows_of(adapter: Path) -> Tensor:
    (rows,) = safetensors.torch.load_file(adapter / "adapter_model.safetensors").values()
    return rows


def clear_ids(model: Path, adapter: Path, length: int = 13) -> list[int]:
    """Whose answer behind the adapter's rows is nowhere a near tie."""
    for seed in range(100):
        ids = random_prompt(length, seed)
        rows = torch.cat([rows_of(adapter), embed(model, ids)])
        answer = hf_generate(model, rows, TOKENS)
        best = hf_logits(model, torch.cat([rows, embed(model, answer)]))[len(rows) - 1 : -1].topk(2).values
        if (best[:, 0] - best[:, 1]).min() > TIE:
            return ids
    raise AssertionError("no clear prompt in a hundred")


@pytest.mark.parametrize("name", NAMES.values())
def test_like_pefts_own_generate(soft: RealServer, llama: Path, adapters: dict[str, Path], name: str) -> None:
    """As ids, streamed, chosen by a part; and the rows come from the cache the second time."""
    ids = clear_ids(llama, adapters[name])
    expected = peft_generate(llama, adapters[name], ids, TOKENS)
    assert expected != hf_generate(llama, ids, TOKENS)
    options = {"max_tokens": TOKENS, "return_token_ids": True}
    part = {"type": "soft_prompt", "name": name}
    parts = [part, {"type": "token_ids", "token_ids": ids}]
    with soft.client() as client:
        first, second, third = (
            client.post("/v1/completions", json=greedy(**chosen, **options)).json()
            for chosen in (
                {"model": f"m:{name}", "prompt": ids},
                {"model": f"m:{name}", "prompt": ids},
                {"prompt": parts},
            )
        )
    for body in (first, second, third):
        assert body["choices"][0]["token_ids"] == expected
        assert body["usage"]["prompt_tokens"] == ROWS + len(ids)
    cached = [body["usage"]["prompt_tokens_details"]["cached_tokens"] for body in (first, second, third)]
    assert cached == [0, 32, 32]
    with openai.OpenAI(base_url=f"{soft.base}/v1", api_key="none") as api:
        chunks = api.completions.create(
            model=f"m:{name}",
            prompt=ids,
            max_tokens=TOKENS,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert text == first["choices"][0]["text"]


def test_chat(soft: RealServer, llama: Path, adapters: dict[str, Path]) -> None:
    name = NAMES["prompt-tuning"]
    tokenizer = AutoTokenizer.from_pretrained(llama)
    messages = [{"role": "user", "content": "What is the answer?"}]
    ids = tokenizer.encode("<bos><turn>user\nWhat is the answer?<eos>\n<turn>assistant\n")
    expected = tokenizer.decode(peft_generate(llama, adapters[name], ids, TOKENS), skip_special_tokens=True)
    with soft.client() as client:
        for model in (f"m:{name}", "m:bare"):
            body = greedy(model=model, messages=messages, max_tokens=TOKENS, ignore_eos=True)
            answer = client.post("/v1/chat/completions", json=body).json()
            assert answer["choices"][0]["message"]["content"] == expected
            assert answer["model"] == model


def test_scoring_behind_a_soft_prompt(soft: RealServer, llama: Path, adapters: dict[str, Path]) -> None:
    """As evaluation harnesses ask: echo, logprobs, no answer."""
    name = NAMES["prompt-tuning"]
    ids = random_prompt(12, 3)
    rows = torch.cat([rows_of(adapters[name]), embed(llama, ids)])
    expected = hf_logits(llama, rows)[ROWS - 1 : -1].log_softmax(-1)[range(len(ids)), ids]
    body = {"model": f"m:{name}", "prompt": ids, "echo": True, "logprobs": 0, "max_tokens": 0, "temperature": 0}
    with soft.client() as client:
        (choice,) = client.post("/v1/completions", json=body).json()["choices"]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected.tolist(), abs=1e-3)
    assert len(choice["logprobs"]["tokens"]) == len(ids)


def test_a_soft_prompt_of_another_model_stops_the_start(llama: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    wide = tmp_path / "wide.safetensors"
    safetensors.torch.save_file({"rows": torch.zeros(3, 32)}, wide)
    with RealServer(tmp_path, llama, soft_prompts=[["wide", str(wide)]]) as server:
        assert server.exit_status(60) == 3
        assert "intarsia: soft prompt wide: the prompt embedding's rows are 32 wide" in server.stderr
