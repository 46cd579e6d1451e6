"""What a whole server writes on standard error, its runner and the libraries in it included."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.real_server import RealServer
from tests.models import Family


def test_every_line_is_an_object(
    tmp_path: Path, tiny_model: Callable[[Family], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the model is loaded, too; and two API processes say once how far that is."""
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS")  # conftest's, for the tests' own output
    with RealServer(tmp_path, tiny_model("llama"), log_format="json", api_workers=2) as server:
        server.wait_ready()
        messages = [json.loads(line)["message"] for line in server.stderr.splitlines()]
    stages = [message for message in messages if message.startswith("loading: ")]
    assert len(stages) == len(set(stages)) > 1
