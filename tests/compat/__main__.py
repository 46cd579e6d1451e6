"""`make compat`: runs each client, in an environment of its own, against a server of this checkout.

    python -m tests.compat .venv-compat/bin/python

The clients need many packages and this project none of them, so they live apart. Exit status 1 if one of them fails.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.models import build_tiny_model

START_SECONDS = 300
CLIENT_SECONDS = 1800


def clients(python: str, base: str) -> dict[str, list[str]]:
    """What is run, by name."""
    schemathesis = str(Path(python).with_name("schemathesis"))
    checks = (
        "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
        "response_schema_conformance,unsupported_method,negative_data_rejection"
    )
    return {
        "lm-eval local-completions": [python, "-m", "tests.compat.lm_eval_local", base],
        "schemathesis": [
            *(schemathesis, "run", f"{base}/openapi.json", "--checks", checks),
            *("--max-examples", "50", "--request-timeout", "120"),
        ],
    }


TINY = ("schemathesis",)
"""Clients that ask for thousands of answers, and do not mind that a tiny random model gives them."""


def main(python: str) -> int:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        tiny = str(build_tiny_model("llama", Path(folder) / "tiny"))
        for name in clients(python, ""):
            print(f"--- {name}", flush=True)
            with server(*((tiny, "--max-model-len", "256") if name in TINY else ())) as base:
                command = clients(python, base)[name]
                try:
                    status = subprocess.run(command, env=environment, timeout=CLIENT_SECONDS, check=False).returncode
                except (OSError, subprocess.TimeoutExpired) as error:
                    print(f"{type(error).__name__}: {error}")
                    status = 1
            if status:
                failed.append(name)
    print("--- failed: " + ", ".join(failed) if failed else "--- all clients passed")
    return 1 if failed else 0


@contextlib.contextmanager
def server(*arguments: str) -> Iterator[str]:
    """The base URL of a ready server of this checkout. `arguments`: for `intarsia serve`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    base = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "server.cli", "serve", *arguments]
    with subprocess.Popen([*command, "--port", str(port), "--log-level", "warning"]) as process:
        try:
            wait_ready(base, process)
            yield base
        finally:
            process.terminate()


def wait_ready(base: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(f"{base}/readyz", timeout=5):  # noqa: S310
            return
        time.sleep(0.5)
    raise SystemExit("the server did not start")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
