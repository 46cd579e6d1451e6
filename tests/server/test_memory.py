"""What the API process holds while an answer takes its time: not the body of its request, nor the rows in it."""

from __future__ import annotations

import base64
import http.client
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models import HIDDEN_SIZE, Family
from tests.server.harness import ServerProcess, completion, eventually
from tests.server.scripted_runner import Script

ROWS = 160_000
"""40 MiB of float32, 53 as base64."""
SLACK = 20 << 20


@pytest.fixture(scope="module")
def server(tiny_model: Callable[[Family], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    script = Script(model=str(tiny_model("llama")), max_model_len=2 * ROWS, step_seconds=0.1)
    with ServerProcess(script, tmp_path_factory.mktemp("server"), max_json_bytes=64 << 20) as server:
        yield server.wait_ready()


def status_bytes(pid: int, name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def anonymous_bytes(pid: int) -> int:
    return status_bytes(pid, "RssAnon")


def embedding(rows: int) -> str:
    file = io.BytesIO()
    np.save(file, np.zeros((rows, HIDDEN_SIZE), dtype=np.float32))
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "kind", ["prompt_embeds", "parts", "an unknown field", "chat", "messages", "chat parts", "input"]
)
def test_a_large_body_is_let_go_of(server: ServerProcess, kind: str, stream: bool) -> None:
    body: dict[str, Any] = completion(1000, stream=stream)
    path = "/v1/completions"
    if kind == "prompt_embeds":
        body |= {"prompt": None, "prompt_embeds": embedding(ROWS)}
    elif kind == "parts":
        half = {"type": "prompt_embeds", "data": embedding(ROWS // 2)}
        body["prompt"] = [{"type": "text", "text": "hi"}, half, {"type": "token_ids", "token_ids": [5]}, half]
    elif kind in ("an unknown field", "chat"):
        body["unknown"] = "x" * (50 << 20)
    if kind in ("chat", "messages", "chat parts"):
        message: dict[str, Any] = {"role": "user", "content": "hi"}
        if kind == "messages":
            message["unknown"] = "x" * (50 << 20)
        if kind == "chat parts":
            part = {"type": "prompt_embeds", "data": embedding(ROWS)}
            message["content"] = [{"type": "text", "text": "hi"}, part]
        path, body["messages"] = "/v1/chat/completions", [message]
        del body["prompt"]
    if kind == "input":
        path = "/v1/responses"
        body = {"input": [{"role": "user", "content": "hi", "unknown": "x" * (50 << 20)}], "max_output_tokens": 1000}
        body |= {"stream": stream, "ignore_eos": True}
    server.complete(1)
    before = anonymous_bytes(server.process.pid)
    queued, aborted = (len(server.messages(kind)) for kind in ("generate", "abort"))
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        eventually(lambda: len(server.messages("generate")) > queued)
        eventually(lambda: anonymous_bytes(server.process.pid) < before + SLACK)
        assert len(server.messages("abort")) == aborted  # It is still being answered.
    finally:
        connection.close()
    eventually(lambda: len(server.messages("abort")) > aborted)


@pytest.mark.parametrize("form", ["base64", "multipart"])
def test_decoding_takes_no_second_body(server: ServerProcess, form: str) -> None:
    """Of 20 MiB of float16 become 40 of float32: what has been decoded or cast is given back on the way."""
    file = io.BytesIO()
    np.save(file, np.zeros((ROWS, HIDDEN_SIZE), dtype=np.float16))
    source = {"data": base64.b64encode(file.getvalue()).decode()} if form == "base64" else {"part": "rows"}
    text = json.dumps({"prompt": [{"type": "prompt_embeds", **source}], "max_tokens": 1})
    server.complete(1)
    pid = server.process.pid
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak is counted from here
    before = status_bytes(pid, "VmRSS")
    with server.client() as client:
        if form == "base64":
            answer = client.post("/v1/completions", content=text, headers={"Content-Type": "application/json"})
        else:
            answer = client.post("/v1/completions", files={"request": (None, text), "rows": ("", file.getvalue())})
    assert answer.status_code == 200, answer.text
    # What there is before or after a step, not the sum of them.
    assert status_bytes(pid, "VmHWM") - before < (40 << 20) + (12 << 20)
