"""Takes docs/playground.png: the default model at work, a prompt of text and embeddings, a token's alternatives.

.venv/bin/python -m tests.browser.screenshot [FILE]
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import threading
from pathlib import Path

import httpx
import safetensors.torch
from safetensors import safe_open
from transformers import AutoTokenizer

from runner.default_model import default_model_path
from tests.browser.chromium import Chromium, find_chromium
from tests.integration.real_server import RealServer
from tests.server.harness import ROOT

BUSY = 9
"""Other clients, so that there is something to see of the engine."""


def main(target: Path) -> None:
    program = find_chromium()
    if program is None:
        sys.exit("no Chromium is installed")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with RealServer(folder, None, served_model_name=["SmolLM2-135M-Instruct"], max_num_seqs=32) as server:
            server.wait_ready()
            rows = save_rows(folder / "capital-of-france.safetensors")
            with Chromium(program, folder / "profile") as browser:
                take(browser, server.base, rows, target)


def save_rows(path: Path) -> Path:
    """The model's own rows of a few words."""
    model = default_model_path()
    ids = AutoTokenizer.from_pretrained(model).encode(" capital of France")
    with safe_open(model / "model.safetensors", "pt") as file:
        safetensors.torch.save_file({"rows": file.get_tensor("model.embed_tokens.weight")[ids]}, path)
    return path


def take(browser: Chromium, base: str, rows: Path, target: Path) -> None:
    browser.resize(1280, 900, scale=1.5)
    browser.open(f"{base}/")
    browser.until("document.querySelector('#model').options.length")
    browser.run("document.querySelector('#temperature').value = 0; document.querySelector('#max_tokens').value = 60")
    browser.type("What is the")
    browser.choose_file("#file", rows)
    browser.until("document.querySelectorAll('#pieces li').length === 2")
    browser.run("document.querySelector('#add-text').click()")
    browser.type("?")
    browser.press("Enter", ctrl=True)
    browser.until("document.querySelector('.note')?.textContent")
    browser.type("What could I see there in one day?")
    browser.press("Enter", ctrl=True)
    for index in range(BUSY):
        threading.Thread(target=ask, args=(base, index), daemon=True).start()
    browser.until(
        "document.querySelectorAll('.note').length === 2 && document.querySelectorAll('.note')[1].textContent"
    )
    busy = "document.querySelector('#running').textContent > 0"
    browser.until(f"{busy} && document.querySelector('#blocks-label').textContent.includes('cached')")
    browser.run("document.querySelector('.turn:last-child .answer').focus()")
    for _ in range(8):
        browser.press("ArrowRight")
    browser.until("!document.querySelector('#details').hidden")
    browser.screenshot(target)


def ask(base: str, index: int) -> None:
    body = {"prompt": f"Chapter {index}. Once upon a time", "max_tokens": 60 + 25 * index, "ignore_eos": True}
    with contextlib.suppress(httpx.HTTPError):  # the server goes before they have their answers
        httpx.post(f"{base}/v1/completions", json=body, timeout=120)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "playground.png")
