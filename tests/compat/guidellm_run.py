"""guidellm against the default model, with the model's folder as its tokenizer. Run by `tests.compat`, in the
checkout's own environment: guidellm is a command. Streamed chats, then streamed completions; every request is answered,
and as long as it was asked to be."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from runner.default_model import default_model_path

REQUESTS = 8
OUTPUT_TOKENS = 16
RUN_SECONDS = 600


def benchmark(program: Path, base: str) -> bool:
    """Whether all was as it should be; prints what was found."""
    passed = True
    for route in ("/v1/chat/completions", "/v1/completions"):
        requests = _requests(program, base, route)
        lengths = {request["output_tokens"] for request in requests["successful"]}
        counts = {kind: len(requests[kind]) for kind in ("successful", "errored", "incomplete")}
        print(f"guidellm {route}: {counts}, output tokens {sorted(lengths)}")
        passed &= counts == {"successful": REQUESTS, "errored": 0, "incomplete": 0} and lengths == {OUTPUT_TOKENS}
    return passed


def _requests(program: Path, base: str, route: str) -> dict[str, list[dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [
            *(str(program), "run", "--disable-console", "--output", f"kind=json,path={path}"),
            *("--backend", f"kind=openai_http,target={base},request_format={route}"),
            *("--tokenizer", f"kind=huggingface_auto,model={default_model_path()}"),
            *("--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={OUTPUT_TOKENS}"),
            *("--profile", "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={REQUESTS}"),
        ]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        subprocess.run(command, timeout=RUN_SECONDS, check=True, env=environment)
        (found,) = json.loads(path.read_text())["benchmarks"]
        requests: dict[str, list[dict[str, Any]]] = found["requests"]
        return requests
