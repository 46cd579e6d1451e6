"""vLLM's own load generator, `vllm bench serve`, against the default model. Run in vLLM's environment, as its module
rather than as its command, which would import the whole engine.

    python -m tests.compat.vllm_bench BASE_URL MODEL_NAME TOKENIZER_FOLDER
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllm.benchmarks.serve import add_cli_args, main  # type: ignore[import-not-found]

REQUESTS = 8
OUTPUT_TOKENS = 16
BACKENDS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


def run(base: str, model: str, tokenizer: str, backend: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    with tempfile.TemporaryDirectory() as folder:
        arguments = parser.parse_args(
            [
                *("--backend", backend, "--endpoint", BACKENDS[backend], "--base-url", base),
                *("--model", model, "--tokenizer", tokenizer, "--dataset-name", "random", "--ignore-eos"),
                *("--random-input-len", "32", "--random-output-len", str(OUTPUT_TOKENS)),
                *("--num-prompts", str(REQUESTS), "--max-concurrency", "4", "--disable-tqdm"),
                *("--save-result", "--result-dir", folder, "--result-filename", "result.json"),
            ]
        )
        main(arguments)
        result: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
        return result


if __name__ == "__main__":
    base, model, tokenizer = sys.argv[1:4]
    failed = False
    for backend in BACKENDS:
        result = run(base, model, tokenizer, backend)
        found = {name: result[name] for name in ("completed", "failed", "total_output_tokens")}
        print(f"vllm bench serve, {backend}: {found}", flush=True)
        failed |= found != {"completed": REQUESTS, "failed": 0, "total_output_tokens": REQUESTS * OUTPUT_TOKENS}
    sys.exit(failed)
