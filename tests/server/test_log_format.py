"""One line a request, as text and as JSON: who, what, how long, how it ended; and never what was said."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest

from runner import log_format as runner_log_format
from server.log_format import Pairs, formatter
from tests.server.conftest import StartServer
from tests.server.harness import ServerProcess, Stream, completion, eventually

SECRET = "the-secret-of-a-prompt"
KEYS = ("sk-first", "sk-second name=website")


def lines_of(server: ServerProcess, route: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in server.stderr.splitlines() if line.startswith("{")]
    return [line for line in found if line.get("route") == route]


def ask(server: ServerProcess, key: str, max_tokens: int = 3, **body: Any) -> Stream:
    told = {"Authorization": f"Bearer {key}", "x-request-id": "client-7"}
    return Stream(server.port, "/v1/completions", completion(max_tokens, **body), told)


@pytest.fixture
def server(start_server: StartServer) -> ServerProcess:
    return start_server({"step_seconds": 0.1}, log_format="json", api_keys=KEYS).wait_ready()


def test_every_line_is_an_object_and_says_what_happened(server: ServerProcess) -> None:
    ask(server, "sk-second", n=2, user=SECRET).rest()
    ask(server, "sk-first", temperature=9, stop=[SECRET]).rest()
    running = ask(server, "sk-second", stream=True, max_tokens=400)
    next(running.events)
    running.close()
    with server.client() as client:
        assert client.get(f"/{SECRET}?{SECRET}", headers={"Authorization": "Bearer sk-first"}).status_code == 404
        assert client.get("/v1/models", headers={"Authorization": f"Bearer {SECRET}"}).status_code == 401
    # An answer is there before its line.
    eventually(lambda: len(lines_of(server, "/v1/completions")) == 3 and len(lines_of(server, "unknown")) == 1)
    eventually(lambda: len(lines_of(server, "/v1/models")) == 1)
    for line in server.stderr.splitlines():
        json.loads(line)
    done, bad, gone = sorted(lines_of(server, "/v1/completions"), key=lambda line: int(line["status"]))
    assert done["status"] == 200 and done["message"] == "request" and done["logger"] == "intarsia.request"
    assert datetime.fromisoformat(done["time"]).tzinfo is not None
    assert re.fullmatch(r"req-[0-9a-f]{24}", done["id"]) and done["client_id"] == "client-7"
    assert (done["method"], done["key"], done["finished"]) == ("POST", "website", ["length"])
    assert (done["prompt_tokens"], done["cached_tokens"], done["completion_tokens"]) == (3, 0, 6)
    assert done["queue_ms"] == 1.0  # as the scripted runner says
    assert 0 < done["ttft_ms"] <= done["ms"]
    assert (bad["status"], bad["error"], bad["key"]) == (400, "invalid_value", "key-1")
    assert "finished" not in bad and "prompt_tokens" not in bad
    assert (gone["status"], gone["sent_status"], gone["cut"]) == (499, 200, "client_left")
    assert gone["finished"] == ["abort"]
    assert "cut" not in done and "cut" not in bad
    (unknown,), (stranger,) = lines_of(server, "unknown"), lines_of(server, "/v1/models")
    assert (unknown["status"], unknown["error"], unknown["key"]) == (404, "not_found", "key-1")
    assert (stranger["status"], stranger["error"]) == (401, "invalid_api_key") and "key" not in stranger
    for secret in (SECRET, "sk-first", "sk-second"):
        assert secret not in server.stderr


def test_who_is_not_let_in_has_asked_for_a_route_all_the_same(start_server: StartServer) -> None:
    server = start_server({"load_seconds": 60}, log_format="json")
    eventually(lambda: server.status("/livez") == 200)
    for route, path in (
        ("/v1/completions", "/v1/completions"),
        ("/v1/responses/{response_id}", f"/v1/responses/{SECRET}"),
        ("/v1/models/{model_id:path}", f"/v1/models/{SECRET}/{SECRET}"),
        ("unknown", f"/v1/{SECRET}"),
    ):
        assert server.status(path) == 503
        (line,) = eventually(lambda route=route: lines_of(server, route))  # type: ignore[misc]
        assert (line["status"], line["error"], line["method"]) == (503, "overloaded", "GET")
    assert SECRET not in server.stderr


def formatted(kind: str, make: Callable[[str], logging.Formatter], log: Callable[[logging.Logger], None]) -> str:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(make(kind))
    logger = logging.Logger("a.b")
    logger.addHandler(handler)
    log(logger)
    return stream.getvalue()


@pytest.mark.parametrize("make", [formatter, runner_log_format.formatter], ids=["server", "runner"])
def test_whatever_is_logged_is_one_json_line(make: Callable[[str], logging.Formatter]) -> None:
    def log(logger: logging.Logger) -> None:
        logger.warning('a "quoted"\nline\r\n%s', "\ud800 é")
        try:
            raise ValueError("in\nvain")
        except ValueError:
            logger.exception("failed")

    first, second = formatted("json", make, log).splitlines()
    assert json.loads(first)["level"] == "WARNING" and json.loads(first)["logger"] == "a.b"
    assert "\n" in json.loads(first)["message"]
    assert "ValueError" in json.loads(second)["traceback"]
    text = formatted("text", make, lambda logger: logger.warning("words"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} WARNING a\.b: words\n", text)


def test_text_lines_are_pairs() -> None:
    assert str(Pairs({"id": "r", "ms": 1.5, "sharp": True, "finished": ["stop", "length"]})) == (
        "id=r ms=1.5 sharp=true finished=stop,length"
    )
