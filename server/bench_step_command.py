"""`intarsia bench step [MODEL]`: the engine's steps without HTTP, timed by `python -m runner.bench_step`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from runner.config import RunnerConfig
from server.child_environment import environment
from server.config import DEFAULT_MODEL_NAME


def _sizes(text: str) -> list[int]:
    sizes = [int(part) for part in text.split(",")]
    if min(sizes) < 1:
        raise ValueError(text)
    return sizes


_sizes.__name__ = "list of sizes"  # what argparse calls it in "invalid … value"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = f"a local Hugging Face folder or a hub id (default: {DEFAULT_MODEL_NAME}, which comes with the package)"
    add("model", nargs="?", metavar="MODEL", help=text)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to run it (default: auto)")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="(default: auto)")
    add("--load-format", choices=("auto", "dummy"), default="auto", help="dummy: random weights (default: auto)")
    add("--max-model-len", type=int, metavar="ROWS", help="(default: the model's own)")
    add("--max-num-batched-tokens", type=int, metavar="ROWS", help="rows of one step (default: by device)")
    add("--attention-backend", choices=("auto", "fa3", "sdpa", "triton"), default="auto", help="(default: auto)")
    add("--enforce-eager", action="store_true", help="never capture CUDA graphs (default: off)")
    text = "sequences that decode (default: 1,2,4,8,16,32,64,128,256)"
    add("--decode", type=_sizes, default=[1, 2, 4, 8, 16, 32, 64, 128, 256], metavar="N,N", help=text)
    text = "rows of whole prompts (default: 128,512,2048,8192)"
    add("--prefill", type=_sizes, default=[128, 512, 2048, 8192], metavar="N,N", help=text)
    add("--context", type=int, default=512, metavar="ROWS", help="of each sequence that decodes (default: 512)")
    text = "memory bandwidth that floors are reckoned with (default: 4.3 TB/s, one H200's; 0: no floors)"
    add("--peak-tb-s", type=float, default=4.3, metavar="X", help=text)
    add("--peak-tflop-s", type=float, default=790.0, metavar="X", help="(default: 790, one H200's in bfloat16)")


def run(arguments: argparse.Namespace) -> int:
    """0: timed; 3: the model can't be loaded as asked."""
    config = RunnerConfig(
        model=arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        load_format=arguments.load_format,
        max_model_len=arguments.max_model_len,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        attention_backend=arguments.attention_backend,
        enforce_eager=arguments.enforce_eager,
    )
    options = {
        "context": arguments.context,
        "decode_batches": arguments.decode,
        "prefill_rows": arguments.prefill,
        "bytes_per_second": arguments.peak_tb_s * 1e12,
        "flop_per_second": arguments.peak_tflop_s * 1e12,
    }
    command = [sys.executable, "-P", "-m", "runner.bench_step", config.to_json(), json.dumps(options)]
    # Our own interpreter and module; the model's name is data inside the JSON.
    return subprocess.run(command, env=environment(), check=False).returncode  # noqa: S603
