"""`python -m tests.bench.receiving`: what 64 MiB of rows cost the API process beyond receiving them.

    python -m tests.bench.receiving [--rows 32768] [--hidden 1024] [--rounds 8]

A real server with a scripted runner behind it, which maps nothing and computes nothing; the same rows as base64 in JSON
(85 MB), as a multipart body and as a raw upload, in turn with the same bodies received by a plain uvicorn
(`plain_uvicorn`), and refused at their head and dropped by this server. Prints CPU milliseconds (user and system, all
threads) of each process for a body, medians of the rounds, the least and the most; and the wall time.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.bench.bodies import dropped, exchange, requests_of
from tests.bench.frontend import cpu_seconds
from tests.bench.plain_uvicorn import PlainUvicorn
from tests.bench.stalls import fake_model
from tests.server.harness import ServerProcess
from tests.server.scripted_runner import Script

_SETTLE_SECONDS = 0.1
"""Memory is given back to the system behind an answer: that is of the request, too."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=32768)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, PlainUvicorn() as plain:
        model = fake_model(Path(folder) / "model", arguments.hidden)
        script = Script(str(model), max_model_len=arguments.rows + 16, dtype="bfloat16")
        with ServerProcess(script, Path(folder), log_level="warning", max_stored_bytes=1 << 30) as server:
            server.wait_ready()
            print(table(measure(server, plain, arguments)))


def measure(
    server: ServerProcess, plain: PlainUvicorn, arguments: argparse.Namespace
) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Of each form and kind: seconds of time and of CPU, one pair a round."""
    requests = requests_of(arguments.rows, arguments.hidden)
    found = defaultdict(list)
    for attempt in range(arguments.rounds + 1):
        for form, (path, content_type, body) in requests.items():
            kinds = kinds_of(server, plain, path, content_type, body)
            for kind, call in kinds.items():
                pair = call()
                if attempt:  # the first round is the warm-up
                    found[form, kind].append(pair)
    return found


def kinds_of(
    server: ServerProcess, plain: PlainUvicorn, path: str, content_type: str, body: bytes
) -> dict[str, Callable[[], tuple[float, float]]]:
    return {
        "request": lambda: counted(server, lambda: answered(server.port, path, body, content_type)),
        "plain": lambda: plain.receive(body),
        "dropped": lambda: counted(server, lambda: dropped(server.port, body)),
    }


def answered(port: int, path: str, body: bytes, content_type: str) -> float:
    seconds, answer = exchange(port, path, body, content_type)
    assert b'"error"' not in answer[:200], answer[:200]
    return seconds


def counted(server: ServerProcess, request: Callable[[], float]) -> tuple[float, float]:
    before = cpu_seconds(server.process.pid)
    seconds = request()
    time.sleep(_SETTLE_SECONDS)
    return seconds, cpu_seconds(server.process.pid) - before


def table(found: dict[tuple[str, str], list[tuple[float, float]]]) -> str:
    lines = [
        "| CPU, ms | the request | plain uvicorn | beyond it | body dropped | beyond it | wall of the three |",
        "|---|---|---|---|---|---|---|",
    ]
    for form in dict.fromkeys(form for form, _ in found):
        kinds = [found[form, kind] for kind in ("request", "plain", "dropped")]
        request, plain, drop = ([cpu for _, cpu in kind] for kind in kinds)
        middle = statistics.median(request)
        beyond = [f"{(middle - statistics.median(each)) * 1e3:.0f}" for each in (plain, drop)]
        wall = ", ".join(f"{statistics.median(seconds for seconds, _ in kind) * 1e3:.0f}" for kind in kinds)
        cells = [told(request), told(plain), beyond[0], told(drop), beyond[1], wall]
        lines.append(f"| {form} | {' | '.join(cells)} |")
    return "\n".join(lines)


def told(seconds: Sequence[float]) -> str:
    middle, least, most = (round(each(seconds) * 1e3) for each in (statistics.median, min, max))
    return f"{middle} ({least} to {most})"


if __name__ == "__main__":
    main()
