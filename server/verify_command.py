"""`intarsia verify MODEL`: the parity matrix on a model of the user's own, run by `python -m runner.verify`."""

from __future__ import annotations

import argparse
import subprocess
import sys

from runner.config import RunnerConfig
from server.child_environment import environment
from server.config import DEFAULT_MODEL_NAME


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = f"a local Hugging Face folder or a hub id (default: {DEFAULT_MODEL_NAME}, which comes with the package)"
    add("model", nargs="?", metavar="MODEL", help=text)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to run it (default: auto)")
    text = "float32 is compared exactly, the others up to near ties of the reference's logits (default: float32)"
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help=text)
    text = "the attention implementation to check (default: auto, chosen as `serve` does)"
    add("--attention-backend", choices=("auto", "fa3", "sdpa", "triton"), default="auto", help=text)
    add("--block-size", type=int, default=16, metavar="N", help="rows per KV block (default: 16)")
    add("--trust-remote-code", action="store_true", help="run code that comes with the model (default: off)")


def run(arguments: argparse.Namespace) -> int:
    """0: every cell of the matrix agrees; 1: some don't; 3: the model can't be served."""
    config = RunnerConfig(
        model=arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        attention_backend=arguments.attention_backend,
        block_size=arguments.block_size,
        trust_remote_code=arguments.trust_remote_code,
    )
    command = [sys.executable, "-P", "-m", "runner.verify", config.to_json()]
    # Our own interpreter and module; the model's name is data inside the JSON.
    return subprocess.run(command, env=environment(), check=False).returncode  # noqa: S603
