"""The servers that the clients of `make compat` talk to, and what their scripts are told of them. `tests.compat` starts
them from the checkout's own environment."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save
from transformers import AutoTokenizer

from runner.default_model import default_model_path
from tests import leash
from tests.compat.setting import QUESTION, Setting
from tests.models import build_tiny_model, hf_generate
from tests.server.harness import ROOT, ServerProcess
from tests.server.scripted_runner import Script

START_SECONDS = 300
TEMPLATES = Path(__file__).parent / "templates"
TOOLS_TEMPLATE = ROOT / "docs" / "smollm2_tools.jinja"


@contextlib.contextmanager
def default_server(*arguments: str) -> Iterator[str]:
    """The base URL of a ready server of this checkout. `arguments`: for `intarsia serve`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    base = f"http://127.0.0.1:{port}"
    process = leash.start("server.cli", "serve", *arguments, "--port", str(port), "--log-level", "warning")
    try:
        wait_ready(base, process)
        yield base
    finally:
        process.terminate()
        leash.end(process)


@contextlib.contextmanager
def tiny_server() -> Iterator[str]:
    """The base URL of a server with a tiny random model, for clients that ask for thousands of answers."""
    with tempfile.TemporaryDirectory() as folder:
        model = str(build_tiny_model("llama", Path(folder) / "tiny"))
        with default_server(model, "--max-model-len", "256") as base:
            yield base


@contextlib.contextmanager
def two_servers() -> Iterator[Path]:
    """A JSON file with a `Setting`, whose servers run: one with the default model, one that is scripted."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = build_tiny_model("llama", folder / "tiny")
        template = (TEMPLATES / "scripted.jinja").read_text()
        script = Script(model=str(model), max_model_len=4096)
        with (
            default_server("--chat-template", str(TOOLS_TEMPLATE)) as base,
            ServerProcess(script, folder, chat_template=template) as scripted,
        ):
            scripted.wait_ready()
            path = folder / "setting.json"
            path.write_text(json.dumps(asdict(_setting(base, scripted.base))))
            yield path


def _setting(base: str, scripted: str) -> Setting:
    folder = default_model_path()
    chat = [{"role": "user", "content": QUESTION}]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    with safe_open(folder / "model.safetensors", "pt") as file:
        rows = file.get_tensor("model.embed_tokens.weight")[ids]
    return Setting(
        base=f"{base}/v1",
        model=_model_name(base),
        scripted=f"{scripted}/v1",
        scripted_model=_model_name(scripted),
        prompt_ids=ids,
        prompt_embeds=base64.b64encode(save({"rows": rows})).decode(),
        answer=tokenizer.decode(hf_generate(folder, ids, 24, ignore_eos=False), skip_special_tokens=True),
    )


def _model_name(base: str) -> str:
    with urllib.request.urlopen(f"{base}/v1/models", timeout=30) as answer:  # noqa: S310
        return str(json.load(answer)["data"][0]["id"])


def wait_ready(base: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(f"{base}/readyz", timeout=5):  # noqa: S310
            return
        time.sleep(0.5)
    raise SystemExit("the server did not start")
