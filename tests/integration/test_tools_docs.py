"""The example of docs/tools.md, as it stands there but for the server's address."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from server.cli import build_parser
from server.serve_command import build_config
from tests.integration.real_server import RealServer
from tests.integration.test_docs import blocks, run_python
from tests.server.harness import ROOT

PAGE = (ROOT / "docs" / "tools.md").read_text()


@pytest.mark.timeout(300)  # on a busy machine the model alone takes a minute to be converted, another to load
def test_example(default_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shell, command), (kind, example) = blocks(PAGE)
    assert (shell, kind) == ("sh", "python")
    monkeypatch.chdir(ROOT)
    program, *arguments = shlex.split(command)
    assert program == "intarsia"
    config = build_config(build_parser().parse_args(arguments))
    with RealServer(tmp_path, None, chat_template=config.chat_template) as server:
        server.wait_ready()
        out, variables = run_python(example.replace("http://127.0.0.1:8000", server.base), tmp_path)
    call, answer = out.splitlines()
    assert call == "get_weather {'city': 'Oslo', 'unit': 'celsius'}"
    # What only the function has said.
    assert "light rain" in answer and "12" in answer
    assert call in PAGE and answer.split()[-1] in PAGE
    assert [message["role"] for message in variables["messages"]] == ["user", "assistant", "tool"]
