"""The console script `intarsia`. Each subcommand is one `Command`; a new one is one more entry in `COMMANDS`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from server import bench_command, healthcheck_command, serve_command, verify_command


@dataclass(frozen=True)
class Command:
    name: str
    help: str
    """One line for `intarsia --help`."""
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    """Returns the exit status. Imports what it needs itself, so that `--help` stays quick."""
    operands: str = "[MODEL]"
    """What may follow the flags, for the line of usage."""


COMMANDS = (
    Command("serve", "serve a model over HTTP", serve_command.add_arguments, serve_command.run),
    Command("verify", "compare a model with transformers", verify_command.add_arguments, verify_command.run),
    Command(
        "healthcheck",
        "ask a server whether it is ready",
        healthcheck_command.add_arguments,
        healthcheck_command.run,
        "",
    ),
    Command("bench", "measure a server", bench_command.add_arguments, bench_command.run, "WHAT"),
)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="intarsia",
        description="An OpenAI-compatible LLM server for prompts made of tokens and embeddings, in any mix.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for command in COMMANDS:
        # The flags are listed below it; twice is too much.
        usage = f"intarsia {command.name} [flags] {command.operands}".rstrip()
        sub = commands.add_parser(command.name, usage=usage, help=command.help, allow_abbrev=False)
        sub.set_defaults(run=command.run, parser=sub)
        command.add_arguments(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status; argparse exits with 2 by itself on wrong usage."""
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(argv)
    subparser: argparse.ArgumentParser = vars(arguments).pop("parser", parser)
    if unknown:
        subparser.error(f"unrecognized arguments: {' '.join(unknown)}")  # With the usage of what was asked for.
    if arguments.version:
        from server.probes import package_version

        print(f"intarsia {package_version()}")
        return 0
    if arguments.command is None:
        parser.print_help()
        return 2
    run: Callable[[argparse.Namespace], int] = arguments.run
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
