"""`make gpu-bench-serve`: the server over HTTP on this machine's GPU, in one call that leaves no process behind.

For each model: writes its folder, starts `intarsia serve` with random weights and no prefix cache, waits until it is
ready, drives it with `intarsia bench serve` from other processes over loopback, stops it. Prints one JSON line for the
start and one for each point: streamed /v1/completions, 512 rows in, 128 tokens out, greedy, `ignore_eos`, closed loop,
as many requests as make a few rounds at each concurrency.

    python3 -m tests.gpu.bench_serve
    python3 -m tests.gpu.bench_serve --models qwen --points 1 64 64e --api-workers 4 --serve "--max-num-seqs 256"

A point is a concurrency; with an `e` behind it its prompts are embeddings.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu.bench_models import MODELS, BenchModel
from tests.gpu.server_process import (
    ROOT,
    Deadline,
    MeasureError,
    die_with_parent,
    end,
    free_port,
    running_server,
    tail,
    wait_ready,
)


@dataclass(frozen=True)
class Load:
    """A point: so many requests in flight, prompts as ids or as embeddings."""

    concurrency: int
    embeds: bool = False

    @classmethod
    def parse(cls, text: str) -> Load:
        number = text.removesuffix("e")
        if not number.isdecimal() or int(number) < 1:
            raise argparse.ArgumentTypeError(f"{text!r} is not a point: write 64, or 64e for embeddings")
        return cls(int(number), text.endswith("e"))

    @property
    def num_requests(self) -> int:
        if self.concurrency == 1:
            return 12
        return self.concurrency * (4 if self.concurrency >= 128 else 5)

    @property
    def num_procs(self) -> int:
        return 4 if self.concurrency >= 32 else 1


def main() -> int:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` is run
    deadline = Deadline(arguments.time_limit)
    failed = False
    with tempfile.TemporaryDirectory(prefix="intarsia-bench-") as folder:
        for name in arguments.models:
            model = MODELS[name]
            try:
                measure(model, Path(folder), arguments, deadline)
            except MeasureError as error:
                failed = True
                report(model=model.name, error=str(error))
    return int(failed)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    text = "default: 1, 64 or 32, 256, and the first two as embeddings"
    parser.add_argument("--points", nargs="+", type=Load.parse, metavar="C[e]", help=text)
    parser.add_argument("--api-workers", type=int, metavar="N", help="passed on to the server")
    parser.add_argument("--serve", default="", metavar="FLAGS", help="more flags for `intarsia serve`, in one string")
    parser.add_argument("--bench", default="", metavar="FLAGS", help="more flags for `intarsia bench serve`")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1, help="how often each point is measured")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.add_argument("--procs", type=int, help="client processes (default: 4 from concurrency 32 on, else 1)")
    parser.add_argument("--time-limit", type=float, default=540, metavar="SECONDS", help="for everything together")
    return parser.parse_args()


def measure(model: BenchModel, parent: Path, arguments: argparse.Namespace, deadline: Deadline) -> None:
    """All points of one model. Raises MeasureError when there is no going on with it."""
    folder = model.write(parent)
    port = arguments.port or free_port()
    log = parent / f"{model.name}.log"
    with running_server(_server_command(folder, port, arguments), log) as server:
        seconds = wait_ready(server, port, deadline, log)
        report(model=model.name, figure="start", seconds_to_ready=round(seconds, 2), flags=arguments.serve)
        for load in arguments.points or default_points(model):
            if deadline.left < 10:
                raise MeasureError(f"no time left for {load}")
            point = run_load(model, load, port, arguments, deadline)
            report(**point | {"model": model.name, "api_workers": arguments.api_workers or 1})
            if server.poll() is not None:
                raise MeasureError(f"the server has exited with {server.returncode}: {tail(log)}")


def default_points(model: BenchModel) -> list[Load]:
    ids = [Load(1), Load(model.middle), Load(256)]
    return [*ids, Load(1, embeds=True), Load(model.middle, embeds=True)]


def _server_command(folder: Path, port: int, arguments: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-m", "server.cli", "serve", str(folder), "--port", str(port)]
    command += ["--load-format", "dummy", "--no-enable-prefix-caching", "--log-level", "warning"]
    if arguments.api_workers is not None:
        command += ["--api-workers", str(arguments.api_workers)]
    return command + shlex.split(arguments.serve)


def run_load(
    model: BenchModel, load: Load, port: int, arguments: argparse.Namespace, deadline: Deadline
) -> dict[str, Any]:
    """The load generator's figures, or what went wrong, as `error`."""
    command = [sys.executable, "-m", "server.cli", "bench", "serve", "--json", "--no-progress"]
    command += ["--url", f"http://127.0.0.1:{port}", "--concurrency", str(load.concurrency)]
    command += ["--num-requests", str(load.num_requests), "--warmup", str(load.concurrency)]
    command += ["--input-len", str(arguments.input_len), "--output-len", str(arguments.output_len)]
    command += ["--vocab-size", str(model.vocab_size), "--procs", str(arguments.procs or load.num_procs)]
    command += ["--rounds", str(arguments.rounds)]
    if load.embeds:
        command += ["--workload", "embeds", "--hidden", str(model.hidden_size)]
    command += shlex.split(arguments.bench)
    bench = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=die_with_parent
    )
    try:
        output, complaint = bench.communicate(timeout=max(1.0, deadline.left))
    except subprocess.TimeoutExpired:
        return {"concurrency": load.concurrency, "error": "the time limit came"}
    finally:
        end(bench)
    if not output:
        return {"concurrency": load.concurrency, "error": complaint[-500:]}
    figures: dict[str, Any] = json.loads(output.splitlines()[-1])
    return figures


def report(**figures: Any) -> None:
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    sys.exit(main())
