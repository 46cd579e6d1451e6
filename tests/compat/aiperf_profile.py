"""aiperf against the default model, with the model's folder as its tokenizer. Run by `tests.compat`, in the checkout's
own environment: aiperf is a command.

Two runs: one whose requests all succeed, counted; and one in which about half of them are to be cancelled, after which
the server has nothing left to do.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from runner.default_model import default_model_path
from server.config import DEFAULT_MODEL_NAME

REQUESTS = 12
OUTPUT_TOKENS = 16
RUN_SECONDS = 300
ABORT_SECONDS = 10


def profile(program: Path, base: str) -> bool:
    """Whether both runs went as they should; prints what each found."""
    whole = _counts(program, base)
    cancelled = _counts(program, base, "--request-cancellation-rate", "50", "--request-cancellation-delay", "0.05")
    idle = _is_idle(base)
    print(f"aiperf: {whole}; with cancellation: {cancelled}; the server is idle: {idle}")
    return whole == {"requests": REQUESTS, "errors": 0} and cancelled["errors"] > 0 and idle


def _counts(program: Path, base: str, *more: str) -> dict[str, int]:
    """How many requests were answered and how many failed (those that aiperf gave up are among them)."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(str(program), "profile", "--model-names", DEFAULT_MODEL_NAME, "--url", base, "--streaming"),
            *("--endpoint-type", "chat", "--tokenizer", str(default_model_path()), "--random-seed", "1"),
            *("--request-count", str(REQUESTS), "--concurrency", "4", "--workers-max", "2"),
            *("--prompt-input-tokens-mean", "32", "--prompt-output-tokens-mean", str(OUTPUT_TOKENS)),
            *("--extra-inputs", "ignore_eos:true", "--ui-type", "none", "--no-gpu-telemetry"),
            *("--artifact-dir", folder, *more),
        ]
        subprocess.run(command, timeout=RUN_SECONDS, check=True)
        (found,) = Path(folder).rglob("profile_export_aiperf.json")
        return {name: _value(json.loads(found.read_text()), metric) for name, metric in _METRICS.items()}


_METRICS = {"requests": "request_count", "errors": "error_request_count"}


def _value(export: dict[str, Any], metric: str) -> int:
    return int((export.get(metric) or {"avg": 0})["avg"])


def _is_idle(base: str) -> bool:
    """Whether soon nothing runs any more in the engine."""
    deadline = time.monotonic() + ABORT_SECONDS
    while time.monotonic() < deadline:
        with urllib.request.urlopen(f"{base}/metrics", timeout=10) as answer:  # noqa: S310
            lines = answer.read().decode().splitlines()
        running = [line for line in lines if "num_requests_running" in line and not line.startswith("#")]
        if running and all(float(line.rpartition(" ")[2]) == 0 for line in running):
            return True
        time.sleep(0.2)
    return False
