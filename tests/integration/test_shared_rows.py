"""Embeddings of some megabytes, which the runner reads in the API processes' memory: answers as Hugging Face gives
them, in every form, and nothing is left of them, however a request ends."""

from __future__ import annotations

import base64
import http.client
import json
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.torch

from tests.bench.wire import synthetic
from tests.integration.real_server import RealServer, as_npy, as_torch_file
from tests.integration.test_answers import greedy
from tests.models import clear_prompt, embed, hf_generate
from tests.server.harness import ServerProcess, eventually
from tests.server.scripted_runner import Script

ROWS, TOKENS = 600, 8
JSON = {"Content-Type": "application/json"}
FILE = {"Content-Type": "application/octet-stream"}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 4 KiB in float32."""
    return synthetic(tmp_path_factory.mktemp("wide") / "model", 2048)


@pytest.fixture(scope="module")
def server(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    options = {"dtype": "float32", "api_workers": 2, "debug_checks": True, "enable_prefix_caching": False}
    with RealServer(tmp_path_factory.mktemp("shared"), wide, max_num_seqs=1, **options) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def prompt(wide: Path) -> tuple[bytes, list[int]]:
    """A file of rows, and the greedy answer to them."""
    ids = clear_prompt(wide, ROWS, 1, TOKENS)
    return safetensors.torch.save({"rows": embed(wide, ids).contiguous()}), hf_generate(wide, ids, TOKENS)


def part(**source: str) -> dict[str, Any]:
    return {"type": "prompt_embeds", **source}


def asked(source: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return greedy(prompt=[source], max_tokens=TOKENS, return_token_ids=True, **fields)


def form(body: dict[str, Any] | bytes, file: bytes) -> dict[str, Any]:
    return {"files": {"rows": file, "request": body if isinstance(body, bytes) else json.dumps(body).encode()}}


def open_files(server: RealServer) -> int:
    """Memory that the API processes share."""
    main = server.process.pid
    children = map(int, Path(f"/proc/{main}/task/{main}/children").read_text().split())
    count = 0
    for pid in (main, *children):
        for each in Path(f"/proc/{pid}/fd").iterdir():
            try:
                count += "intarsia-rows" in os.readlink(each)
            except OSError:
                continue
    return count


def runner_of(server: RealServer) -> int:
    main = server.process.pid
    children = map(int, Path(f"/proc/{main}/task/{main}/children").read_text().split())
    (runner,) = (pid for pid in children if b"\0runner\0" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return runner


def mappings(server: RealServer) -> int:
    """What the runner has mapped of it."""
    return Path(f"/proc/{runner_of(server)}/maps").read_text().count("intarsia-rows")


def test_every_form_answers_like_hugging_face(server: RealServer, wide: Path, prompt: tuple[bytes, list[int]]) -> None:
    file, expected = prompt
    rows = safetensors.torch.load(file)["rows"]
    with server.client() as client:
        name = client.post("/v1/prompt_embeds", content=file, headers=FILE).json()["id"]
        calls: list[dict[str, Any]] = [
            form(asked(part(part="rows")), file),
            form(asked(part(part="rows")), base64.b64decode(as_npy(rows))),
            form(asked(part(part="rows")), base64.b64decode(as_torch_file(rows))),
            {"json": asked(part(data=base64.b64encode(file).decode()))},
            {"json": asked(part(id=name))},
            {"json": asked(part(id=name))},
        ]
        for call in calls:
            answer = client.post("/v1/completions", **call)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["token_ids"] == expected
        eventually(lambda: mappings(server) == 1)  # the stored one; a thread gives the others back
        assert client.delete(f"/v1/prompt_embeds/{name}").status_code == 200
    eventually(lambda: mappings(server) == open_files(server) == 0)


def test_the_runner_reads_it_where_it_is(server: RealServer, prompt: tuple[bytes, list[int]]) -> None:
    file, _ = prompt
    body = asked(part(part="rows"), stream=True) | {"max_tokens": 1000, "n": 64}  # one after another: for minutes
    with server.client() as client, client.stream("POST", "/v1/completions", **form(body, file)) as answer:
        next(answer.iter_lines())
        assert mappings(server) == 1
        eventually(lambda: open_files(server) == 0)  # let go of with the body
    eventually(lambda: mappings(server) == 0)


def test_a_runner_without_descriptors_wants_another_try(server: RealServer, prompt: tuple[bytes, list[int]]) -> None:
    file, expected = prompt
    calls = [("/v1/completions", form(asked(part(part="rows")), file))]
    calls += [("/v1/prompt_embeds", {"content": file, "headers": FILE})]
    runner = runner_of(server)
    before = resource.prlimit(runner, resource.RLIMIT_NOFILE)
    with server.client() as client:
        resource.prlimit(runner, resource.RLIMIT_NOFILE, (3, before[1]))
        try:
            refused = [client.post(path, **call) for path, call in calls]
        finally:
            resource.prlimit(runner, resource.RLIMIT_NOFILE, before)
        assert [each.status_code for each in refused] == [429, 429]
        assert all(each.headers["Retry-After"] == "1" for each in refused)
        (path, call), _ = calls
        assert client.post(path, **call).json()["choices"][0]["token_ids"] == expected
    eventually(lambda: mappings(server) == open_files(server) == 0)


def test_base64_that_is_cut_or_refused_leaves_nothing(server: RealServer, prompt: tuple[bytes, list[int]]) -> None:
    """It is made into rows while it comes, too."""
    file, expected = prompt
    good, last = base64.b64encode(file).decode(), base64.b64encode(file[:-4] + b"\xff\xff\xff\x7f").decode()
    whole = json.dumps(asked(part(data=good))).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: "
    for end in (800_000, 2_000_000, len(whole) - 1):
        with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
            connection.sendall(f"{head}{len(whole)}\r\n\r\n".encode() + whole[:end])
            eventually(lambda: open_files(server) == 1)
        eventually(lambda: open_files(server) == 0)
    ids = greedy(prompt=[part(data=good), {"type": "token_ids", "token_ids": [-5]}])
    with server.client() as client:
        for body in (asked(part(data=last)), asked(part(data=good[:-2] + "!=")), asked(part(data=good[:-4])), ids):
            assert client.post("/v1/completions", json=body).status_code == 400
        for text in (whole + b"}", whole[:-1], whole.replace(b'"}]', b'", "data": "AAAA"}]')):
            assert client.post("/v1/completions", content=text, headers=JSON).status_code == 400
        eventually(lambda: mappings(server) == open_files(server) == 0)
        answer = client.post("/v1/completions", content=whole, headers=JSON).json()
        assert answer["choices"][0]["token_ids"] == expected


def test_a_client_that_is_still_sending_sees_the_answer(server: RealServer, prompt: tuple[bytes, list[int]]) -> None:
    body = json.dumps(asked(part(data=base64.b64encode(prompt[0]).decode()))).encode()
    body = body[:800_000] + b"!" + body[800_000:]
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nConnection: close\r\n"
    with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:700_000])
        eventually(lambda: open_files(server) == 1)
        connection.sendall(body[700_000:1_500_000])
        eventually(lambda: open_files(server) == 0)  # refused, and let go of
        connection.sendall(body[1_500_000:])
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert (response.status, b"prompt[0].data" in response.read()) == (400, True)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/prompt_embeds"])
def test_what_is_cut_or_refused_leaves_nothing(server: RealServer, prompt: tuple[bytes, list[int]], path: str) -> None:
    file, expected = prompt
    request = httpx.Request("POST", server.base + path, **form(asked(part(part="rows")), file))
    whole, kind = request.read(), request.headers["content-type"]
    for end in (300_000, 1_500_000, len(whole) - 1):
        with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
            head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: {kind}\r\nContent-Length: {len(whole)}\r\n\r\n"
            connection.sendall(head.encode() + whole[:end])
            eventually(lambda: open_files(server) == 1)
        eventually(lambda: open_files(server) == 0)
    bad = file[:-4] + b"\xff\xff\xff\x7f"
    with server.client() as client:
        if path == "/v1/completions":
            good, unknown = (
                part(part="rows"),
                greedy(prompt=[part(part="rows"), {"type": "token_ids", "token_ids": [-5]}]),
            )
            for body, sent in ((asked(good), bad), (asked(part(part="other")), file), (unknown, file), (b"{", file)):
                assert client.post(path, **form(body, sent)).status_code == 400
        else:
            refused = client.post(path, content=bad, headers=FILE)
            assert (refused.status_code, f"row {ROWS - 1} " in refused.text) == (400, True)
        eventually(lambda: mappings(server) == open_files(server) == 0)
        answer = client.post("/v1/completions", **form(asked(part(part="rows")), file)).json()
        assert answer["choices"][0]["token_ids"] == expected


@pytest.mark.parametrize("shares", [True, False])
def test_a_runner_elsewhere_is_sent_the_rows(wide: Path, tmp_path: Path, shares: bool) -> None:
    script = Script(str(wide), max_model_len=ROWS + 10, dtype="float32", shares=shares)
    file = safetensors.torch.save({"rows": embed(wide, [5] * ROWS).contiguous()})
    with ServerProcess(script, tmp_path) as server, server.wait_ready().client() as client:
        answer = client.post("/v1/completions", **form({"prompt": [part(part="rows")], "max_tokens": 1}, file))
        assert answer.status_code == 200
        stored = client.post("/v1/prompt_embeds", content=file, headers=FILE).json()
        assert stored["rows"] == ROWS
        (message,) = server.messages("generate")
        assert message["frames"] == [4 * ROWS, 16 * ROWS, 4096 * ROWS]
        assert message["shared"] == (4096 * ROWS if shares else 0)
