"""The same prompt as text, ids and embeddings, through every client, alone and in a crowd: always the same answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from tests.integration.real_server import RealServer, as_npy, as_safetensors, as_torch_file
from tests.models import clear_prompt, embed, hf_generate

TOKENS = 24


def reference(path: Path, ids: list[int], tokens: int = TOKENS) -> str:
    """Hugging Face's greedy answer as text."""
    text: str = AutoTokenizer.from_pretrained(path).decode(
        hf_generate(path, ids, tokens, ignore_eos=True), skip_special_tokens=True
    )
    return text


def greedy(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, **fields}


def test_text_ids_and_embeddings_answer_alike(server: RealServer, llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(llama)
    text = "What is the capital of France?"
    ids = tokenizer(text)["input_ids"]
    expected = reference(llama, ids)
    rows = embed(llama, ids)
    prompts: list[dict[str, Any]] = [{"prompt": text}, {"prompt": ids}]
    prompts += [{"prompt_embeds": encode(rows)} for encode in (as_safetensors, as_torch_file, as_npy)]
    with server.client() as client:
        for prompt in prompts:
            response = client.post("/v1/completions", json=greedy(**prompt))
            assert response.status_code == 200, response.text
            body = response.json()
            assert body["choices"][0]["text"] == expected
            assert body["usage"]["prompt_tokens"] == len(ids)
            assert body["usage"]["completion_tokens"] == TOKENS


@pytest.fixture
def client(server: RealServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openai_client(client: openai.OpenAI, llama: Path) -> None:
    ids = clear_prompt(llama, 21, seed=3, max_new_tokens=TOKENS)
    expected = reference(llama, ids)
    rows = as_torch_file(embed(llama, ids))
    extra = {"ignore_eos": True}
    common: dict[str, Any] = {"model": "m", "max_tokens": TOKENS, "temperature": 0}
    whole = client.completions.create(prompt=ids, extra_body=extra, **common)
    embedded = client.completions.create(
        prompt="", extra_body={**extra, "prompt": None, "prompt_embeds": rows}, **common
    )
    assert whole.choices[0].text == embedded.choices[0].text == expected

    for body in (extra, {**extra, "prompt": None, "prompt_embeds": rows}):
        stream = client.completions.create(
            prompt=ids, stream=True, stream_options={"include_usage": True}, extra_body=body, **common
        )
        chunks = list(stream)
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == expected
        usage = chunks[-1].usage
        assert usage is not None and usage.completion_tokens == TOKENS and usage.prompt_tokens == len(ids)

    both = client.completions.create(prompt=[ids[:9], ids], extra_body={**extra, "prompt_embeds": rows}, **common)
    texts = [choice.text for choice in both.choices]
    assert texts == [expected, reference(llama, ids[:9]), expected]
    assert client.models.retrieve("m").id == "m"


def test_chat_is_the_template_s_prompt(client: openai.OpenAI, llama: Path) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the answer?"}]
    encoding = AutoTokenizer.from_pretrained(llama).apply_chat_template(messages, add_generation_prompt=True)
    ids = list(encoding["input_ids"] if hasattr(encoding, "keys") else encoding)
    answer = client.chat.completions.create(
        model="m", messages=messages, max_tokens=TOKENS, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].message.content == reference(llama, ids)
    parts: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "What is the answer?"}]}]
    stream = client.chat.completions.create(
        model="m", messages=parts, max_tokens=TOKENS, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == answer.choices[0].message.content


def test_thirty_two_at_once_answer_like_one_at_a_time(server: RealServer, llama: Path) -> None:
    prompts = [clear_prompt(llama, 5 + 3 * i, seed=i, max_new_tokens=TOKENS) for i in range(8)]
    expected = [(reference(llama, ids), hf_generate(llama, ids, TOKENS, ignore_eos=True)) for ids in prompts]
    common: dict[str, Any] = {"model": "m", "max_tokens": TOKENS, "temperature": 0}

    async def ask(client: openai.AsyncOpenAI, i: int) -> tuple[str, list[int]]:
        ids = prompts[i % 8]
        body: dict[str, Any] = {"ignore_eos": True, "return_token_ids": True}
        if i % 4 > 1:
            body |= {"prompt": None, "prompt_embeds": as_safetensors(embed(llama, ids))}
        parts: list[Any]
        if i % 2:
            chunks = await client.completions.create(prompt=ids, stream=True, extra_body=body, **common)
            parts = [chunk.choices[0] async for chunk in chunks]
        else:
            parts = (await client.completions.create(prompt=ids, extra_body=body, **common)).choices
        return "".join(part.text for part in parts), [token for part in parts for token in part.token_ids]

    async def crowd_and_alone() -> tuple[list[Any], list[Any]]:
        async with openai.AsyncOpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0) as client:
            crowd = await asyncio.gather(*(ask(client, i) for i in range(32)))
            return crowd, [await ask(client, i) for i in range(8)]

    crowd, alone = asyncio.run(crowd_and_alone())
    assert crowd == expected * 4
    assert alone == expected


def test_the_api_process_has_no_torch(server: RealServer, llama: Path, client: openai.OpenAI) -> None:
    """Not even once it has used all that might want it: embeddings in every format, a chat template, text."""
    rows = embed(llama, [5, 6, 7])
    for payload in (as_safetensors(rows), as_npy(rows), as_torch_file(rows.bfloat16())):
        body = {"prompt": None, "prompt_embeds": payload}
        client.completions.create(model="m", prompt="", max_tokens=1, extra_body=body)
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=1)

    def has_torch(pid: int) -> bool:
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()

    assert has_torch(server.runner_pid)
    assert not has_torch(server.process.pid)


def test_siblings_share_the_prompt(server: RealServer, llama: Path) -> None:
    ids = clear_prompt(llama, 40, seed=9, max_new_tokens=TOKENS)
    with server.client() as client:
        body = client.post("/v1/completions", json=greedy(prompt=ids, n=3, cache_salt="siblings")).json()
        assert [choice["text"] for choice in body["choices"]] == [reference(llama, ids)] * 3
        sampled = client.post("/v1/completions", json=greedy(prompt=ids, n=3, temperature=1.0, seed=5)).json()
    assert len({choice["text"] for choice in sampled["choices"]}) == 3
