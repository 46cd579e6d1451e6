"""Stored embeddings on a real server: answers as Hugging Face gives them, shared cache, life and death in use."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.torch

from tests.integration.real_server import RealServer, as_safetensors
from tests.integration.test_answers import greedy
from tests.integration.test_mixed_prompts import clear_texts
from tests.models import HIDDEN_SIZE, embed, hf_generate
from tests.server.harness import Stream, eventually

ROUTE = "/v1/prompt_embeds"
FILE = {"Content-Type": "application/octet-stream"}
TOKENS = 16
BLOCK = 16


def file_of(path: Path, ids: list[int]) -> bytes:
    return safetensors.torch.save({"rows": embed(path, ids).contiguous()})


def store(client: httpx.Client, path: Path, ids: list[int]) -> str:
    response = client.post(ROUTE, content=file_of(path, ids), headers=FILE)
    assert response.status_code == 200, response.text
    return str(response.json()["id"])


def stored(name: str) -> dict[str, Any]:
    return {"type": "prompt_embeds", "id": name}


def token_ids(ids: list[int]) -> dict[str, Any]:
    return {"type": "token_ids", "token_ids": ids}


def as_form(body: dict[str, Any], **fields: bytes) -> dict[str, Any]:
    return {"files": {"request": httpx.Request("POST", "http://a", json=body).read(), **fields}}


@pytest.fixture(scope="module")
def small(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """Two API processes, two keys, one slot, and room for one embedding of 100 rows, which does not stay long."""
    folder = tmp_path_factory.mktemp("small")
    room = 150 * HIDDEN_SIZE * 4
    options = {"api_workers": 2, "api_keys": ["a", "b"], "max_stored_bytes": room, "max_stored_bytes_per_key": room}
    with RealServer(folder, llama, dtype="float32", debug_checks=True, max_num_seqs=1, **options) as server:
        yield server.wait_ready()


def test_random_cuts_answer_like_the_whole(server: RealServer, llama: Path) -> None:
    """Stored, in a form and in base64, between ids, alone and all in one batch."""
    rng = random.Random(11)
    texts = clear_texts(llama, 5, rng)
    expected = [hf_generate(llama, ids, TOKENS) for ids in texts]
    prompts: list[list[dict[str, Any]]] = []
    fields: list[dict[str, bytes]] = []
    with server.client() as client:
        for ids in texts:
            a, b, c, d = sorted(rng.sample(range(1, len(ids)), 4))
            name = f"rows{len(prompts)}"
            fields.append({name: file_of(llama, ids[b:c])})
            first, last = store(client, llama, ids[:a]), store(client, llama, ids[d:])
            inline = {"type": "prompt_embeds", "data": as_safetensors(embed(llama, ids[c:d]))}
            field = {"type": "prompt_embeds", "part": name}
            prompts.append([stored(first), token_ids(ids[a:b]), field, inline, stored(last)])
        options = {"max_tokens": TOKENS, "return_token_ids": True}
        for prompt, field_files, ids, answer in zip(prompts, fields, texts, expected, strict=True):
            form = as_form(greedy(prompt=prompt, cache_salt="one", **options), **field_files)
            body = client.post("/v1/completions", **form).json()
            assert body["choices"][0]["token_ids"] == answer
            assert body["usage"]["prompt_tokens"] == len(ids)
        every = {name: data for each in fields for name, data in each.items()}
        form = as_form(greedy(prompt=prompts, n=2, cache_salt="all", **options), **every)
        body = client.post("/v1/completions", **form).json()
    assert [choice["token_ids"] for choice in body["choices"]] == [answer for answer in expected for _ in range(2)]


def test_stored_and_inline_rows_share_blocks(server: RealServer, llama: Path) -> None:
    (ids,) = clear_texts(llama, 1, random.Random(12))
    ids = (ids * 4)[: 4 * BLOCK + 5]
    with server.client() as client:
        whole, middle = store(client, llama, ids), store(client, llama, ids[7:40])
        inline = {"type": "prompt_embeds", "data": as_safetensors(embed(llama, ids))}

        def cached(*prompt: dict[str, Any]) -> int:
            body = greedy(prompt=list(prompt), max_tokens=1, cache_salt="stored")
            answer = client.post("/v1/completions", json=body).json()
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert cached(stored(whole)) == 0
        assert cached(stored(whole)) == cached(inline) == 4 * BLOCK
        assert cached(token_ids(ids[:7]), stored(middle), token_ids(ids[40:])) == 0
        assert cached(token_ids(ids[:7]), stored(middle), token_ids(ids[40:])) == 4 * BLOCK
        # The same rows at other places, and other rows in the same place.
        assert cached(token_ids(ids[:8]), stored(middle), token_ids(ids[40:])) == 0
        assert cached(stored(middle), stored(middle)) == 0


def test_embeddings_that_begin_alike_share_whole_groups(server: RealServer, llama: Path) -> None:
    """These rows are short: they are hashed by fours, from an embedding's first one on."""
    (ids,) = clear_texts(llama, 1, random.Random(13))
    rows = embed(llama, (ids * 5)[: 4 * BLOCK + 5])
    with server.client() as client:

        def cached(before: list[int], row: int | None, salt: str) -> int:
            changed = rows.clone()
            if row is not None:
                changed[row] += 1
            prompt = [{"type": "prompt_embeds", "data": as_safetensors(changed)}]
            body = greedy(prompt=[token_ids(before), *prompt] if before else prompt, max_tokens=1, cache_salt=salt)
            answer = client.post("/v1/completions", json=body).json()
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        for before in ([], [5, 6]):
            salt = f"alike{len(before)}"
            assert cached(before, None, salt) == 0
            for row in (0, 15, 16, 29, 31, 50, 63):
                alike = len(before) + (row if not before else row // 4 * 4)
                assert cached(before, row, salt) == alike // BLOCK * BLOCK


def test_chat(server: RealServer, llama: Path) -> None:
    (ids,) = clear_texts(llama, 1, random.Random(13))
    inline = {"type": "prompt_embeds", "data": as_safetensors(embed(llama, ids))}
    with server.client() as client:
        parts = [inline, stored(store(client, llama, ids)), {"type": "prompt_embeds", "part": "rows"}]
        bodies = [greedy(messages=[{"role": "user", "content": [part]}]) for part in parts]
        answers = [client.post("/v1/chat/completions", json=body).json() for body in bodies[:2]]
        form = as_form(bodies[2], rows=file_of(llama, ids))
        answers.append(client.post("/v1/chat/completions", **form).json())
    contents = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert contents[0] == contents[1] == contents[2]


def test_every_process_knows_them_and_each_key_its_own(small: RealServer, llama: Path) -> None:
    (ids,) = clear_texts(llama, 1, random.Random(14))
    answers = set()
    with small.client(headers={"Authorization": "Bearer a"}) as client:
        name = store(client, llama, ids)
    for _ in range(4):  # connections are dealt out in turn
        with small.client(headers={"Authorization": "Bearer a"}) as client:
            assert [each["id"] for each in client.get(ROUTE).json()["data"]] == [name]
            body = client.post("/v1/completions", json=greedy(prompt=[stored(name)])).json()
            answers.add(body["choices"][0]["text"])
        with small.client(headers={"Authorization": "Bearer b"}) as client:
            assert client.get(ROUTE).json()["data"] == []
            assert client.get(f"{ROUTE}/{name}").status_code == 404
            assert client.post("/v1/completions", json=greedy(prompt=[stored(name)])).status_code == 404
    assert len(answers) == 1


def test_what_is_in_use_outlives_its_deletion(small: RealServer, llama: Path) -> None:
    (ids,) = clear_texts(llama, 1, random.Random(15))
    ids = (ids * 5)[:100]
    key = {"Authorization": "Bearer a"}
    with small.client(headers=key) as client:
        name, other = store(client, llama, ids), file_of(llama, ids[::-1])
        long = greedy(prompt=[stored(name)], max_tokens=256, return_token_ids=True, cache_salt="x")
        expected = client.post("/v1/completions", json=long).json()["choices"][0]["token_ids"]
        # Has the only slot for a minute, if nobody takes it away.
        body = greedy(prompt=[5], max_tokens=300, n=128, stream=True)
        other_answer = Stream(small.port, "/v1/completions", body, key)
        with client.stream("POST", "/v1/completions", json=long | {"stream": True, "cache_salt": "y"}) as stream:
            assert client.delete(f"{ROUTE}/{name}").status_code == 200
            refused = client.post("/v1/completions", json=long)
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "prompt_embeds_not_found")
            # Its memory is still taken.
            assert client.post(ROUTE, content=other, headers=FILE).status_code == 429
            other_answer.close()
            events = list(stream.iter_lines())
        chunks = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
        assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == expected
        # Given back: there is room again.
        assert client.post(ROUTE, content=other, headers=FILE).status_code == 200


def test_an_aborted_request_gives_its_rows_back(small: RealServer, llama: Path) -> None:
    (ids,) = clear_texts(llama, 1, random.Random(16))
    ids = (ids * 5)[:100]
    with small.client(headers={"Authorization": "Bearer b"}) as client:
        name = store(client, llama, ids)
        body = greedy(prompt=[stored(name)], max_tokens=300, n=128, stream=True)  # a minute's
        with client.stream("POST", "/v1/completions", json=body) as stream:
            next(stream.iter_lines())
        # Refused after the store was asked: too long an answer for the runner, an id that is gone, a bad grammar.
        too_long = greedy(prompt=[stored(name)], max_tokens=511, ignore_eos=True)
        assert client.post("/v1/completions", json=too_long).status_code == 400
        grammar = greedy(prompt=[stored(name)], structured_outputs={"regex": "("})
        assert client.post("/v1/completions", json=grammar).status_code == 400
        other = file_of(llama, ids[::-1])
        eventually(lambda: client.post(ROUTE, content=other, headers=FILE).status_code == 200)
