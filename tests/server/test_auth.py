"""Who gets in. Every route of the real application is walked, with the spellings by which guards have been passed."""

from __future__ import annotations

import http.client
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from server.auth import OPEN_PATHS, Auth, hashed
from tests.models import Family
from tests.server.harness import ServerProcess
from tests.server.scripted_runner import Script

KEYS = ("first-key", "second-kéy")


@pytest.fixture(scope="module")
def guarded(tiny_model: Callable[[Family], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    script = Script(model=str(tiny_model("llama")))
    with ServerProcess(script, tmp_path_factory.mktemp("guarded"), api_keys=KEYS) as server:
        yield server.wait_ready()


def ask(server: ServerProcess, method: str, path: str, authorization: str | bytes | None = None) -> tuple[int, bytes]:
    """Without a client library's ideas about paths."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {} if authorization is None else {"Authorization": authorization}
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    try:
        return response.status, response.read()
    finally:
        connection.close()


def routes(server: ServerProcess) -> list[tuple[str, str]]:
    with server.client(headers={"Authorization": f"Bearer {KEYS[0]}"}) as client:
        paths = client.get("/openapi.json").json()["paths"]
    found = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    return [*found, ("GET", "/openapi.json")]


def test_every_route_but_the_probes_needs_a_key(guarded: ServerProcess) -> None:
    walked = routes(guarded)
    assert {path for _, path in walked} >= {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize"}
    assert {path for _, path in walked} >= OPEN_PATHS | {"/metrics", "/version"}
    for method, path in walked:
        status, _ = ask(guarded, method, path.replace("{id}", "x"))
        assert (status == 401) == (path not in OPEN_PATHS), (method, path, status)


@pytest.mark.parametrize(
    "path", ["//v1/models", "/v1//models", "/V1/models", "/v1/models/", "/%761/models", "/nowhere"]
)
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "DELETE", "TRACE"])
def test_other_spellings_need_one_too(guarded: ServerProcess, method: str, path: str) -> None:
    assert ask(guarded, method, path)[0] == 401


@pytest.mark.parametrize("path", ["//livez", "/livez/", "/livez/../v1/models", "/LIVEZ", "/livez%2f..%2fv1%2fmodels"])
def test_nothing_gets_in_by_looking_like_a_probe(guarded: ServerProcess, path: str) -> None:
    assert ask(guarded, "GET", path)[0] == 401


def test_probes_are_open(guarded: ServerProcess) -> None:
    for path in OPEN_PATHS:
        assert ask(guarded, "GET", path)[0] == 200
        assert ask(guarded, "HEAD", path)[0] == 200


@pytest.mark.parametrize("authorization", [b"Bearer first-key", b"bearer  first-key", "Bearer second-kéy".encode()])
def test_each_key_opens(guarded: ServerProcess, authorization: bytes) -> None:
    assert ask(guarded, "GET", "/v1/models", authorization)[0] == 200


@pytest.mark.parametrize(
    "authorization",
    [None, b"", b"Bearer", b"Bearer ", b"first-key", b"Basic first-key", b"Bearer first-ke", b"Bearer \xff\xfe"],
)
def test_anything_else_does_not(guarded: ServerProcess, authorization: bytes | None) -> None:
    status, body = ask(guarded, "GET", "/v1/models", authorization)
    assert status == 401
    assert b'"code": "invalid_api_key"' in body
    assert b"first-key" not in body


def test_no_cross_origin_headers(guarded: ServerProcess) -> None:
    headers = {"Origin": "https://evil.example", "Authorization": f"Bearer {KEYS[0]}"}
    with guarded.client() as client:
        answer = client.get("/v1/models", headers=headers)
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_keys_may_be_given_as_digests() -> None:
    kept = hashed(KEYS)
    assert hashed(kept) == kept
    assert hashed([f"{KEYS[0]}  name=a requests=5"]) == (f"{kept[0]} name=a requests=5",)
    auth = Auth(lambda *_: pytest.fail("not asked"), kept)
    assert [auth._find(f"Bearer {key}".encode().decode("latin-1")) for key in KEYS] == [0, 1]
    assert auth._find(f"Bearer {kept[0]}") is None  # The digest is not a key.


def test_a_key_that_is_not_utf8() -> None:
    """A command line may hold any bytes; Python has them as lone surrogates."""
    auth = Auth(lambda *_: pytest.fail("not asked"), [os.fsdecode(b"k\xff")])
    assert auth._find(b"Bearer k\xff".decode("latin-1")) == 0
    assert auth._find("Bearer k") is None
