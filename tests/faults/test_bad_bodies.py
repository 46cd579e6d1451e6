"""Wrong bodies for every route, by the thousand: each is answered, with no 5xx, in OpenAI's shape, in time, and without
a word about the machine that the server runs on. `make faults` sends 20,000; a few hundred are in `make test`."""

from __future__ import annotations

import getpass
import json
import random
import re
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx

from tests.faults.body_mutator import BodyMutator
from tests.faults.faulty_server import FaultyServer
from tests.faults.traffic import Traffic

CLIENTS = 6
ANSWER_SECONDS = 60
"""A compiler of grammars and a template have ten seconds each, a queue some more."""
MAX_ERROR_BYTES = 6000
SHAPE = {"message", "type", "param", "code"}

TELLTALES = re.compile(
    r"/(?:home|root|tmp|usr|opt|var|proc|work|etc(?!/passwd))\b|site-packages|\.py\b|\bline \d+\b.*\bin \w+"
    r"|Traceback|0x[0-9a-f]{6,}|\bipc://|\bworker\d|\.sock\b|object at|<class|pydantic|starlette|uvicorn"
    r"|torch\.(?:nn|_|cuda)",
    re.IGNORECASE,
)
"""Folders, files, addresses, names of libraries: what an error must never tell."""


class Verdicts:
    """Sends bodies, and judges what comes back."""

    def __init__(self, server: FaultyServer, model: Path) -> None:
        self._server = server
        hidden = {str(model), str(Path.home()), socket.gethostname(), getpass.getuser()}
        self._hidden = {name for name in hidden if len(name) > 4}
        self.statuses: Counter[int] = Counter()

    def send(self, client: httpx.Client, path: str, body: bytes, content_type: str = "application/json") -> None:
        headers = {"Content-Type": content_type}
        told = f"POST {path} {body[:600]!r}"
        try:
            answer = client.post(path, content=body, headers=headers, timeout=ANSWER_SECONDS)
        except httpx.TransportError as error:
            raise AssertionError(f"{type(error).__name__} instead of an answer to {told}") from error
        self.statuses[answer.status_code] += 1
        assert answer.status_code < 500, f"{answer.status_code} {answer.text[:300]} for {told}"
        if answer.status_code == 200:
            self._judge_events(answer, told)
        else:
            self._judge_error(answer.text, told)

    def _judge_events(self, answer: httpx.Response, told: str) -> None:
        if "text/event-stream" not in answer.headers["content-type"]:
            return
        for line in answer.text.splitlines():
            if line.startswith('data: {"error"'):
                self._judge_error(line[6:], told)

    def _judge_error(self, text: str, told: str) -> None:
        assert len(text.encode()) <= MAX_ERROR_BYTES, told
        error = json.loads(text)["error"]
        assert set(error) == SHAPE, f"{text[:300]} for {told}"
        assert error["message"], told
        self.judge_words(text, told)

    def judge_words(self, text: str, told: str) -> None:
        found = TELLTALES.search(text)
        assert found is None, f"{found[0]!r} in {text[:500]} for {told}"
        assert not [name for name in self._hidden if name in text], f"{text[:500]} for {told}"


def examples_of(server: FaultyServer) -> list[tuple[str, dict[str, Any]]]:
    """Every route that takes JSON, with the body that /openapi.json shows for it."""
    with server.client() as client:
        paths = client.get("/openapi.json").json()["paths"]
    found = []
    for path, methods in paths.items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        if "application/json" in content:
            found.append((re.sub(r"{[^}]*}", "nobody", path), content["application/json"]["example"]))
    return found


def valid_bodies(
    model: Path, seed: int, examples: Sequence[tuple[str, dict[str, Any]]]
) -> Callable[[], tuple[str, dict[str, Any]]]:
    """Draws a route and a body that it takes."""
    traffic, rng = Traffic(model, seed, max_tokens=4), random.Random(seed)
    more: list[tuple[str, dict[str, Any]]] = [
        ("/tokenize", {"prompt": "hello"}),
        ("/v1/completions/render", {"prompt": [5, 6, 7], "add_special_tokens": True}),
    ]

    def draw() -> tuple[str, dict[str, Any]]:
        return traffic.draw() if rng.random() < 0.6 else rng.choice([*examples, *more])

    return draw


def test_wrong_bodies(faulty: FaultyServer, llama: Path, long_run: bool) -> None:
    count, seed = (20_400, random.randrange(1 << 30)) if long_run else (480, 7)
    print("seed", seed)
    verdicts, examples = Verdicts(faulty, llama), examples_of(faulty)

    def client(number: int) -> None:
        mutator, draw = BodyMutator(seed + number), valid_bodies(llama, seed + number, examples)
        with faulty.client() as client:
            for _ in range(count // CLIENTS):
                path, body = draw()
                verdicts.send(client, path, mutator.mutate(body))

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(client, range(CLIENTS)))
    refused = sum(number for status, number in verdicts.statuses.items() if status != 200)
    assert refused > count / 3, verdicts.statuses  # The others were still valid.
    print(dict(verdicts.statuses))
    faulty.assert_well()


def test_no_error_tells_of_the_machine(faulty: FaultyServer, llama: Path) -> None:
    """Errors that come from elsewhere than bodies: unknown routes, methods, heads, media types, files that lie."""
    verdicts = Verdicts(faulty, llama)
    head = "Host: x\r\nContent-Type: application/json\r\n"
    requests = [
        f"GET /nowhere HTTP/1.1\r\n{head}\r\n",
        f"DELETE /v1/completions HTTP/1.1\r\n{head}\r\n",
        f"GET /v1/models/nobody HTTP/1.1\r\n{head}\r\n",
        f"GET /v1/responses/resp_nobody HTTP/1.1\r\n{head}\r\n",
        f"POST /v1/completions HTTP/1.1\r\n{head}Content-Length: 99999999999\r\n\r\n",
        f"POST /v1/completions HTTP/1.1\r\n{head}X: {'v' * 70_000}\r\n\r\n",
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}",
        "nonsense\r\n\r\n",
    ]
    for request in requests:
        with socket.create_connection(("127.0.0.1", faulty.port), 30) as connection:
            connection.sendall(request.encode())
            answer = HTTPResponse(connection)
            answer.begin()
            body = answer.read().decode()
            answer.close()
        assert 400 <= answer.status < 500
        assert set(json.loads(body)["error"]) == SHAPE
        verdicts.judge_words(body, request[:100])
        verdicts.judge_words(str(answer.headers), request[:100])
