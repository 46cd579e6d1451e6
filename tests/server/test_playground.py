"""The playground's files: who gets them, under which policy, and that they keep to it. tests/browser runs them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

import server.playground
from server.app import create_app
from server.config import ServerConfig
from server.engine_client import EngineClient
from server.lifecycle import Lifecycle
from server.metrics import Metrics

FOLDER = Path(server.playground.__file__).parent
PAGE = (FOLDER / "index.html").read_text()
SCRIPTS = sorted(FOLDER.glob("*.js"))
FORBIDDEN = r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|new Function|localStorage|cookie"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineClient]:
    """Of a server whose model is still loading."""
    engine = EngineClient(Metrics("m"), tmp_path)
    yield engine
    asyncio.run(engine.close())


def application(engine: EngineClient, *, playground: bool = True) -> FastAPI:
    return create_app(ServerConfig(api_keys=("secret",), playground=playground), engine, Lifecycle(engine))


def send(app: FastAPI, method: str, path: str, **headers: str) -> httpx.Response:
    async def request() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(request())


def test_the_page_needs_no_key_and_no_model(engine: EngineClient) -> None:
    """A browser that opens a page can't send one; and what it shows while the model loads is up to it."""
    app = application(engine)
    page = send(app, "GET", "/")
    assert (page.status_code, page.text) == (200, PAGE)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    head = send(app, "HEAD", "/")
    assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", str(len(page.content)))
    known = send(app, "GET", "/", **{"if-none-match": page.headers["etag"]})
    assert (known.status_code, known.content) == (304, b"")


def test_its_files_are_named_in_the_log(engine: EngineClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "intarsia.request")
    app = application(engine)
    for path in ("/", "/playground/style.css"):
        assert send(app, "GET", path).status_code == 200
    assert [record.__dict__["fields"]["route"] for record in caplog.records] == ["/", "/playground/style.css"]


def test_nothing_else_is_let_in_with_it(engine: EngineClient) -> None:
    """Only these very paths and methods; the page's numbers need a key as any other."""
    app = application(engine)
    for method, path in (
        ("POST", "/"),
        ("GET", "/playground"),
        ("GET", "/playground/"),
        ("GET", "/playground/index.html"),
        ("GET", "/playground/__init__.py"),
        ("GET", "/playground/../config.py"),
        ("GET", "/playground/%2e%2e/config.py"),
        ("GET", "/playground/app.js/"),
        ("GET", "/playground/config"),
        ("DELETE", "/playground/app.js"),
    ):
        assert send(app, method, path).status_code == 401, path
    assert send(app, "GET", "/playground/config", authorization="Bearer secret").status_code == 503


def test_it_can_be_off(engine: EngineClient) -> None:
    app = application(engine, playground=False)
    for path in ("/", "/playground/app.js", "/playground/config"):
        assert send(app, "GET", path).status_code == 401


def test_a_strict_policy_on_every_file(engine: EngineClient) -> None:
    app = application(engine)
    paths = re.findall(r'(?:src|href)="(/[^"]+)"', PAGE)
    paths += [f"/playground/{script.name}" for script in SCRIPTS]
    assert "/playground/app.js" in paths and "/playground/style.css" in paths
    for path in ["/", *paths]:
        response = send(app, "GET", path)
        assert response.status_code == 200, path
        policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert "unsafe" not in str(policy) and policy["require-trusted-types-for"] == "'script'"
        assert response.headers["x-content-type-options"] == "nosniff"


def test_everything_comes_from_here_and_nothing_is_inline() -> None:
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=|javascript:", PAGE)
    texts = {
        path.name: path.read_text() for path in FOLDER.iterdir() if path.suffix in (".html", ".js", ".css", ".svg")
    }
    for name, text in texts.items():
        outside = [url for url in re.findall(r"https?://[^\s\"')]+", text) if url != "http://www.w3.org/2000/svg"]
        assert not outside, name
    for script in SCRIPTS:
        assert not re.search(FORBIDDEN, texts[script.name])
        for imported in re.findall(r'from "\./(.+?)"', texts[script.name]):
            assert imported in texts


def test_every_control_has_a_name_and_every_name_its_element() -> None:
    ids = set(re.findall(r'\bid="([^"]+)"', PAGE))
    for wanted in re.findall(r'(?:aria-controls|aria-labelledby|for)="([^"]+)"', PAGE):
        assert wanted in ids
    for script in SCRIPTS:
        assert set(re.findall(r'(?:byId|getElementById)\("([^"]+)"\)', script.read_text())) <= ids
    for control in re.findall(r"<(?:input|select|textarea)\b[^>]*>", PAGE):
        name = re.search(r'id="([^"]+)"', control)
        assert name is not None
        labelled = "aria-label=" in control or f'for="{name[1]}"' in PAGE
        assert labelled or re.search(rf"<label[^>]*>[^<]*{re.escape(control)}", PAGE), control
