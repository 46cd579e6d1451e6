"""The client against the routes: what it sends means what was meant, and what they refuse is raised."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from server.client import Client, ClientError, encode_rows
from server.embeddings import decode_embedding
from tests.models import HIDDEN_SIZE
from tests.server.fakes import FakeEngine, StoreHarness, application, ids_of, say, services

ROWS = np.linspace(-1, 1, 3 * HIDDEN_SIZE, dtype=np.float32).reshape(3, HIDDEN_SIZE)


class _InProcess(httpx.BaseTransport):
    """An application in the same process, for a client that knows nothing of event loops."""

    def __init__(self, app: Any) -> None:
        self._app = app

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        async def send() -> tuple[int, httpx.Headers, bytes]:
            content = request.read()
            given = httpx.Request(request.method, request.url, headers=request.headers, content=content)
            response = await httpx.ASGITransport(self._app).handle_async_request(given)
            return response.status_code, response.headers, await response.aread()

        status, headers, content = asyncio.run(send())
        return httpx.Response(status, headers=headers, content=content)


class Setting:
    def __init__(self, **options: Any) -> None:
        self.engine = FakeEngine(say("answer"), **options)
        self.harness = StoreHarness()
        app = application(services(self.engine, stored=self.harness.stored))
        self.http = httpx.Client(transport=_InProcess(app), base_url="http://test")
        self.client = Client(http=self.http)

    def sent(self) -> tuple[list[int], list[bytes]]:
        """The last prompt: token ids, and each span's rows."""
        prompt = self.engine.submitted[-1].prompt
        return prompt.token_ids.tolist(), [bytes(rows) for rows in prompt.rows]


@pytest.fixture
def setting() -> Iterator[Setting]:
    setting = Setting()
    yield setting
    setting.client.close()
    assert not setting.http.is_closed  # it is the caller's
    setting.http.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_arrive_as_they_are(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    tensor = torch.from_numpy(ROWS).to(dtype)
    given: list[Any] = [tensor, tensor[None], tensor.t().contiguous().t(), torch.nn.Parameter(tensor)]
    if dtype != torch.bfloat16:
        given += [tensor.numpy(), np.asfortranarray(tensor.numpy())]
    for rows in given:
        found = decode_embedding(encode_rows(rows), hidden_size=HIDDEN_SIZE, dtype=name, max_rows=3)
        assert bytes(found.data) == tensor.view(torch.uint8).numpy().tobytes()


def test_what_are_no_rows() -> None:
    for rows in (ROWS.astype(np.float64), ROWS.astype(np.int32), torch.zeros(2, 2, dtype=torch.int8), [[0.5]], None):
        with pytest.raises(TypeError, match="float32, float16, bfloat16"):
            encode_rows(rows)
    assert encode_rows(memoryview(b"a file")) == b"a file"


def test_a_prompt_of_all_pieces(setting: Setting) -> None:
    client = setting.client
    kept = client.upload(ROWS[:1])
    part = {"type": "token_ids", "token_ids": [9]}
    answer = client.complete(["ques", ROWS, [7, 8], kept, part, encode_rows(ROWS[1:])], max_tokens=4, temperature=0)
    assert answer["choices"][0]["text"]
    token_ids, rows = setting.sent()
    assert token_ids == [*ids_of("ques"), -1, -1, -1, 7, 8, -1, 9, -1, -1]
    assert rows == [ROWS.tobytes(), b"", ROWS[1:].tobytes()]


def test_prompts_of_one_piece(setting: Setting) -> None:
    client = setting.client
    kept = client.upload(ROWS)
    prompts: list[tuple[Any, list[int]]] = [("ques", ids_of("ques")), ([5, 6], [5, 6]), (ROWS, [-1] * 3)]
    for prompt, expected in [*prompts, (kept, [-1] * 3), ([ROWS], [-1] * 3)]:
        client.complete(prompt, max_tokens=1)
        assert setting.sent()[0] == expected


def test_chat(setting: Setting) -> None:
    content = ["ques", ROWS, setting.client.upload(ROWS)]
    messages: list[dict[str, Any]] = [{"role": "system", "content": "a"}, {"role": "user", "content": content}]
    answer = setting.client.chat(messages)
    assert answer["choices"][0]["message"]["content"] == "answer"
    assert setting.sent()[1] == [ROWS.tobytes(), b""]
    chunks = list(setting.client.stream_chat(messages))
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "answer"
    assert content[1] is ROWS  # what it was given is left alone


def test_streams(setting: Setting) -> None:
    chunks = list(setting.client.stream([ROWS], max_tokens=8))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "answer"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_text_with_ends_of_lines_that_are_none_of_the_stream(size: int) -> None:
    """Those of `str.splitlines`, which JSON leaves as they are."""
    text = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\r\nh"
    chunks: list[Any] = [{"choices": [{"text": each}]} for each in (text, "", text)]
    events = [f"data: {json.dumps(chunk, ensure_ascii=False)}\r\n\r\n" for chunk in chunks]
    body = "".join([": a comment\n", *events, "data: [DONE]\n\n"]).encode()

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=(body[at : at + size] for at in range(0, len(body), size)))

    with httpx.Client(transport=httpx.MockTransport(answer), base_url="http://test") as http:
        assert list(Client(http=http).stream("ques")) == chunks


def test_stored(setting: Setting) -> None:
    client = setting.client
    kept = [client.upload(ROWS * number) for number in (1, 2, 3)]
    assert client.upload(ROWS).id == kept[0].id
    assert client.get(kept[1].id) == kept[1]
    assert [each.id for each in client.list()] == [each.id for each in kept[::-1]]
    client.delete(kept[1])
    client.delete(kept[2].id)
    assert [each.id for each in client.list()] == [kept[0].id]
    for call in (lambda: client.get(kept[1].id), lambda: client.complete([kept[1]])):
        with pytest.raises(ClientError) as caught:
            call()
        assert (caught.value.status, caught.value.code) == (404, "prompt_embeds_not_found")


def test_many_pages(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.client._PAGE", 2)
    kept = [setting.client.upload(ROWS * number).id for number in range(1, 6)]
    assert [each.id for each in setting.client.list()] == kept[::-1]


def test_refusals(setting: Setting) -> None:
    with pytest.raises(ClientError) as caught:
        setting.client.complete([ROWS], max_tokens=-1)
    error = caught.value
    assert (error.status, error.param, error.code) == (400, "max_tokens", "invalid_value")
    assert str(error).startswith("400: max_tokens")
    with pytest.raises(ClientError) as caught:
        next(setting.client.stream([ROWS[:, :5]]))
    assert (caught.value.status, caught.value.param) == (400, "prompt[0].part")


def test_an_answer_that_fails_half_way() -> None:
    setting = Setting(fail_after=2)
    chunks = setting.client.stream("ques")
    with pytest.raises(ClientError) as caught:
        list(chunks)
    assert caught.value.code == "engine_failed"
    setting.http.close()


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (502, b"<html>", "not one of this API's"),
        (500, b'{"error": "no"}', "not one of this API's"),
        (200, b'data: {"choices": []}\n\n', "before its end"),
    ],
)
def test_answers_of_somebody_else(status: int, content: bytes, message: str) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(status, content=content))
    with httpx.Client(transport=transport, base_url="http://a") as http, pytest.raises(ClientError, match=message):
        list(Client(http=http).stream("a"))


def test_the_key_and_the_model_are_sent() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={})

    with Client("http://a/", "secret", model="m") as client:
        headers = dict(client._http.headers)
    assert headers["authorization"] == "Bearer secret"
    with httpx.Client(transport=httpx.MockTransport(answer), base_url="http://a") as http:
        client = Client(http=http, model="m")
        client.complete("a")
        client.complete("a", model="other")
    assert [json.loads(request.content)["model"] for request in seen] == ["m", "other"]


def test_it_brings_neither_the_server_nor_torch() -> None:
    code = "import sys, server.client as c; print(sorted({'torch', 'fastapi', 'numpy', 'zmq'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
