"""`intarsia bench …`: measurements, each a subcommand. `bench serve` is the load generator in `server.bench`; `bench
step` times the engine alone."""

from __future__ import annotations

import argparse

from server import bench_step_command
from server.bench import flags as serve_flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    prog = "intarsia bench"
    benches = parser.add_subparsers(dest="bench", metavar="WHAT", title="measurements", required=True, prog=prog)
    text = "load a server with requests and report latencies and throughput"
    bench = benches.add_parser("serve", help=text, usage="intarsia bench serve [flags]", allow_abbrev=False)
    serve_flags.add_arguments(bench)
    bench.set_defaults(run_bench=_serve, parser=bench)
    text = "time the engine's steps without HTTP"
    step = benches.add_parser("step", help=text, usage="intarsia bench step [flags] [MODEL]", allow_abbrev=False)
    bench_step_command.add_arguments(step)
    step.set_defaults(run_bench=bench_step_command.run, parser=step)


def run(arguments: argparse.Namespace) -> int:
    status: int = arguments.run_bench(arguments)
    return status


def _serve(arguments: argparse.Namespace) -> int:
    from server.bench.command import run

    return run(arguments)
