"""Web pages: which may read answers, and what browsers are told of all answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.models import Family
from tests.server.harness import ServerProcess
from tests.server.scripted_runner import Script

PAGE, OTHER = "https://page.example", "http://localhost:3000"
KEY = {"Authorization": "Bearer key"}
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}
BODY = {"model": "scripted", "prompt": [5, 6], "max_tokens": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def opened(tiny_model: Callable[[Family], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    script = Script(model=str(tiny_model("llama")))
    folder = tmp_path_factory.mktemp("opened")
    with ServerProcess(script, folder, api_keys=["key"], cors_origins=[PAGE, OTHER]) as server:
        yield server.wait_ready()


def allowed(answer: httpx.Response) -> str | None:
    found: str | None = answer.headers.get("access-control-allow-origin")
    return found


def test_a_preflight_needs_no_key(opened: ServerProcess) -> None:
    for origin in (PAGE, OTHER):
        answer = httpx.options(f"{opened.base}/v1/completions", headers={"Origin": origin, **PREFLIGHT})
        assert answer.status_code == 200
        assert allowed(answer) == origin
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert set(answer.headers["access-control-allow-headers"].split(",")) >= {"authorization", "x-stainless-os"}
        assert "Origin" in answer.headers["vary"]


@pytest.mark.parametrize("stream", [False, True])
def test_answers_and_errors_can_be_read(opened: ServerProcess, stream: bool) -> None:
    for headers, status in ((KEY, 200), ({}, 401)):
        with httpx.stream(
            "POST",
            f"{opened.base}/v1/completions",
            json=BODY | {"stream": stream},
            headers={"Origin": PAGE, **headers},
        ) as answer:
            text = b"".join(answer.iter_raw())
        assert answer.status_code == status
        assert allowed(answer) == PAGE
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        assert text.rstrip().endswith(b"[DONE]") == (stream and status == 200)
        assert ("text/event-stream" in answer.headers["content-type"]) == (stream and status == 200)


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "", PAGE + ".evil.example", PAGE.upper(), "https://"]
)
def test_other_pages_get_nothing(opened: ServerProcess, origin: str) -> None:
    for method, headers, status in (("GET", KEY, 200), ("GET", {}, 401), ("OPTIONS", PREFLIGHT, 401)):
        answer = httpx.request(method, f"{opened.base}/v1/models", headers={"Origin": origin, **headers})
        assert answer.status_code == status
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_credentials_of_the_browser_are_never_allowed(opened: ServerProcess) -> None:
    for method, headers in (("OPTIONS", PREFLIGHT), ("GET", KEY)):
        answer = httpx.request(method, f"{opened.base}/v1/models", headers={"Origin": PAGE, "Cookie": "a=b", **headers})
        assert allowed(answer) == PAGE
        assert "access-control-allow-credentials" not in answer.headers


def test_every_answer_says_what_it_is(opened: ServerProcess) -> None:
    for path, headers in (
        ("/livez", {}),
        ("/v1/models", {}),
        ("/v1/models", KEY),
        ("/nowhere", KEY),
        ("/openapi.json", KEY),
    ):
        answer = httpx.get(opened.base + path, headers=headers)
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["cache-control"] == "no-store"
    with httpx.stream("POST", f"{opened.base}/v1/completions", json=BODY | {"stream": True}, headers=KEY) as answer:
        assert answer.headers["cache-control"] == "no-cache"
        answer.read()
