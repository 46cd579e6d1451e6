"""The examples of README.md and docs/prompt_embeds.md, as they stand there but for the server's address and the model's
folder, against a server. No example goes without."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor
from transformers import AutoTokenizer

from server.cli import build_parser
from server.serve_command import build_config
from tests.integration.real_server import RealServer
from tests.models import EOS_ID, embed, hf_generate
from tests.peft_adapters import peft_generate
from tests.server.harness import ROOT

README = (ROOT / "README.md").read_text()
PAGE = (ROOT / "docs" / "prompt_embeds.md").read_text()
TOKENS = 24
CAPITAL = ("The capital of", " France", " is")
"""What most examples ask; the default model knows it."""

# An example's language, and what only it has.
ROWS = ("python", "def embedding")
CURL = ("sh", "cat > body.json")
OPENAI = ("python", "prompt=[")
CHAT = ("python", "model=model, messages=[")
ENCODER = ("python", "def encode")
TRAIN = ("python", "get_peft_model(")
SERVE = ("sh", "intarsia serve")
POET = ("python", 'model=f"{model}:poet"')
PARTS = ("json", "<base64>")
FORM = ("sh", "-F rows=")
STORED = ("sh", "/v1/prompt_embeds")
STORED_ANSWER = ("json", '"object"')
OUR_CLIENT = ("python", "server.client")
ON_THE_PAGE = (ROWS, CURL, OPENAI, CHAT, ENCODER, TRAIN, SERVE, POET, PARTS, FORM, STORED, STORED_ANSWER, OUR_CLIENT)

ASK_TEXT = ("sh", '"messages"')
ASK_IDS = ("sh", '"prompt": [1,')
ASK_ROWS = ("sh", "<<'PYTHON'")
ASK_OPENAI = ("python", "stream=True")
IN_THE_README = (ASK_TEXT, ASK_IDS, ASK_ROWS, ASK_OPENAI)

Example = tuple[str, str]


def blocks(page: str) -> list[tuple[str, str]]:
    return re.findall(r"^```(\w+)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("page", "examples"), [(PAGE, ON_THE_PAGE), (README, IN_THE_README)], ids=["page", "readme"])
def test_every_example_is_here(page: str, examples: tuple[Example, ...]) -> None:
    claims = [[mark for language, mark in examples if kind == language and mark in text] for kind, text in blocks(page)]
    assert all(len(each) == 1 for each in claims)
    assert len(claims) == len(examples)


def source(page: str, example: Example, server: RealServer, model: Path | str = "") -> str:
    """The example for this server and model."""
    language, mark = example
    (text,) = ["\n" + text for kind, text in blocks(page) if kind == language and mark in text]
    for there, here in (
        ("http://127.0.0.1:8000", server.base),
        ("path/to/model", str(model)),
        ("$(python ", f"$({sys.executable} "),
        ("\n.venv/bin/python ", f"\n{sys.executable} "),
        ("\npython ", f"\n{sys.executable} "),
        ("| python ", f"| {sys.executable} "),
    ):
        text = text.replace(there, here)
    return text.removeprefix("\n")


def run_python(text: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """What an example prints, and its variables. In this process, which has imported the large libraries already."""
    (folder / "example.py").write_text(text)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT's
        variables = runpy.run_path(str(folder / "example.py"))
    if "client" in variables:
        variables["client"].close()
    return out.getvalue(), variables


def run_shell(text: str, folder: Path) -> Any:
    """What an example's curl got."""
    done = subprocess.run(["bash", "-c", text], cwd=folder, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def until_end(model: Path, tokens: list[int]) -> str:
    """As an answer's text."""
    tokens = tokens[: tokens.index(EOS_ID)] if EOS_ID in tokens else tokens
    return str(AutoTokenizer.from_pretrained(model).decode(tokens, skip_special_tokens=True))


def answer_to(model: Path, *pieces: str | Tensor) -> str:
    """By transformers, to texts tokenised one by one and rows."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [
        each if isinstance(each, Tensor) else embed(model, tokenizer.encode(each, add_special_tokens=False))
        for each in pieces
    ]
    return until_end(model, hf_generate(model, torch.cat(rows), TOKENS))


# --- docs/prompt_embeds.md --------------------------------------------------------------------------------------------


@pytest.fixture
def folder(server: RealServer, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a reader stands: with rows.py."""
    (tmp_path / "rows.py").write_text(source(PAGE, ROWS, server, llama))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "rows", raising=False)
    return tmp_path


def test_curl(server: RealServer, llama: Path, folder: Path) -> None:
    body = run_shell(source(PAGE, CURL, server, llama), folder)
    assert body["choices"][0]["text"] == answer_to(llama, *CAPITAL)


def test_openai_client(server: RealServer, llama: Path, folder: Path) -> None:
    out, _ = run_python(source(PAGE, OPENAI, server, llama), folder)
    assert out == answer_to(llama, *CAPITAL) + "\n"


def test_chat(server: RealServer, llama: Path, folder: Path) -> None:
    out, _ = run_python(source(PAGE, CHAT, server, llama), folder)
    before, after = "<bos><turn>user\nWhat is the", "?<eos>\n<turn>assistant\n"
    assert out == answer_to(llama, before, " capital of France", after) + "\n"


def test_own_encoder(server: RealServer, llama: Path, folder: Path) -> None:
    out, variables = run_python(source(PAGE, ENCODER, server, llama), folder)
    rows = variables["encode"](variables["image"]).detach()
    assert rows.shape[0] == (64 // 16) ** 2
    before, after = "<bos><turn>user\nDescribe this picture: ", "<eos>\n<turn>assistant\n"
    assert out == answer_to(llama, before, rows, after) + "\n"


def test_form_and_store(server: RealServer, llama: Path, folder: Path) -> None:
    """The second uses the file of the first."""
    for example in (FORM, STORED):
        body = run_shell(source(PAGE, example, server, llama), folder)
        assert body["choices"][0]["text"] == answer_to(llama, *CAPITAL)


def test_what_an_upload_answers(server: RealServer, llama: Path) -> None:
    file = save({"rows": embed(llama, [4, 5, 6])})
    with server.client() as client:
        answer = client.post("/v1/prompt_embeds", content=file, headers={"Content-Type": "application/octet-stream"})
    shown = json.loads(source(PAGE, STORED_ANSWER, server))
    assert {name: type(value) for name, value in answer.json().items()} == {
        name: type(value) for name, value in shown.items()
    }


def test_our_client(server: RealServer, llama: Path, folder: Path) -> None:
    """The same answer twice, whole and streamed."""
    out, _ = run_python(source(PAGE, OUR_CLIENT, server, llama), folder)
    expected = answer_to(llama, *CAPITAL)
    assert out == f"{expected}\n{expected}"


def test_parts(server: RealServer, llama: Path) -> None:
    """Each line is a part that a server takes, or would if it had that soft prompt, that embedding or that field."""
    missing = {"name": 404, "id": 404, "part": 400}
    data = base64.b64encode(save({"rows": embed(llama, [4, 5, 6])})).decode()
    with server.client() as client:
        for line in source(PAGE, PARTS, server).splitlines():
            part = json.loads(line.replace("<base64>", data))
            response = client.post("/v1/completions/render", json={"prompt": [part]})
            expected = [status for name, status in missing.items() if name in part] or [200]
            assert [response.status_code] == expected, response.text


@pytest.fixture
def poet(server: RealServer, llama: Path, folder: Path) -> Iterator[RealServer]:
    """The server that the page's command starts, with the soft prompt that it has trained."""
    run_python(source(PAGE, TRAIN, server, llama), folder)
    program, *arguments = shlex.split(source(PAGE, SERVE, server, llama))
    assert program == "intarsia"
    config = build_config(build_parser().parse_args(arguments))
    assert config.model == str(llama)
    given = [(name, str(folder / path)) for name, path in config.soft_prompts]  # a test's server stands elsewhere
    with RealServer(folder, llama, dtype="float32", soft_prompts=given) as started:
        yield started.wait_ready()


def test_soft_prompt(poet: RealServer, llama: Path, folder: Path) -> None:
    out, _ = run_python(source(PAGE, POET, poet, llama), folder)
    ids = AutoTokenizer.from_pretrained(llama).encode("What is the capital of France?")
    assert out == until_end(llama, peft_generate(llama, folder / "poet", ids, TOKENS)) + "\n"


# --- README.md --------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)  # on a busy machine the model alone takes a minute to be converted, another to load
def test_readme(default_model: Path, tmp_path: Path) -> None:
    """The product's own start: no model named, no configuration, the embedded weights. All ways give one answer."""
    answers = []
    with RealServer(tmp_path, None) as server:
        server.wait_ready()
        asked = run_shell(source(README, ASK_TEXT, server), ROOT)
        answers.append(asked["choices"][0]["message"]["content"])
        for example in (ASK_IDS, ASK_ROWS):
            asked = run_shell(source(README, example, server), ROOT)
            answers.append(asked["choices"][0]["text"])
            assert asked["choices"][0]["finish_reason"] == "stop"
        (ids,) = re.findall(r'"prompt": (\[.*?\])', source(README, ASK_IDS, server), re.DOTALL)
        buffer = io.BytesIO()
        torch.save(embed(default_model, json.loads(ids)), buffer)
        embeds = base64.b64encode(buffer.getvalue()).decode()
        text = source(README, ASK_OPENAI, server).replace("embeds = ...", f"print(); embeds = {embeds!r}")
        answers += run_python(text, tmp_path)[0].splitlines()
    assert answers == ["The capital of France is Paris."] * 5
    assert f"*{answers[0]}*" in README
