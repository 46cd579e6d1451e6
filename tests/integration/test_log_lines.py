"""What a whole server writes on standard error, its runner and the libraries in it included."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from tests.integration.real_server import RealServer
from tests.models import HIDDEN_SIZE, Family


def test_every_line_is_an_object(
    tmp_path: Path, tiny_model: Callable[[Family], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the model is loaded, and at the end, too; and of two API processes one says how far it is, and what there
    is."""
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS")  # conftest's, for the tests' own output
    rows = tmp_path / "rows.safetensors"
    safetensors.numpy.save_file({"rows": np.zeros((3, HIDDEN_SIZE), np.float32)}, rows)
    options = {"log_format": "json", "api_workers": 2, "soft_prompts": [["soft", str(rows)]]}
    with RealServer(tmp_path, tiny_model("llama"), **options) as server:
        server.wait_ready().signal(signal.SIGTERM)
        assert server.exit_status() == 0  # so that the last line is whole
        messages = [json.loads(line)["message"] for line in server.stderr.splitlines()]
    assert messages.count("soft prompt soft: 3 rows") == 1
    stages = [message for message in messages if message.startswith("loading: ")]
    assert len(stages) == len(set(stages)) > 1
