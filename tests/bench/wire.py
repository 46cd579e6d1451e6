"""`make bench-wire`: what it takes to get embeddings to the engine, in each form that a client can choose.

    python -m tests.bench.wire [--rows 1024 8192 24576] [--rounds 5] [--model FOLDER --device cuda --load-format dummy]

Time to first token of a streamed completion whose prompt is nothing but rows, sent as base64 in JSON, as a multipart
body, and as the id of a stored embedding, beside as many token ids; in turn, medians of the rounds. Cold: nothing of
the prompt is cached. Warm: all of it is, so that what is left is the way there. Bodies are made beforehand.

Beside them the same bodies received by a plain uvicorn in a process of its own (`plain_uvicorn`), and by this server,
which refuses them at their head and drops the rest. The first one's wall time is the transfer in what a prompt of
embeddings is allowed to take: 1.05 times what token ids take, and the transfer.
CPU milliseconds (user and system) are those of the API process, or of the plain uvicorn, for a warm request.

Without --model: one layer with a single head, but rows of 1,024 values, so that a CPU can take 24,576 of them.
Prints one JSON line for each number of rows, then tables for docs/performance.md.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import random
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from tests.bench.bodies import (
    COMPLETIONS,
    FORM,
    JSON,
    RAW,
    SALT,
    UPLOAD,
    completion,
    dropped,
    exchange,
    multipart,
    part,
    post,
    tensor_file,
)
from tests.bench.frontend import cpu_seconds
from tests.bench.plain_uvicorn import PlainUvicorn
from tests.integration.real_server import RealServer
from tests.models import build_tokenizer

FORMS = {"ids": JSON, "base64": JSON, "multipart": FORM, "stored": JSON}
WIRE = ("base64", "multipart")
"""What a body's size is of."""
ALLOWED = 1.05
_salts = itertools.count()


@dataclass(frozen=True)
class Figures:
    """Medians, milliseconds."""

    cold: float
    """0 of bodies that are no prompts."""
    warm: float
    cpu: float

    def told(self) -> dict[str, float]:
        return {name: value for name, value in vars(self).items() if value}


Results = dict[int, dict[str, Figures]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 8192, 24576])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", type=Path, help="a local folder; default: a synthetic model for the CPU")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--load-format", default="auto")
    arguments = parser.parse_args()
    results: Results = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        PlainUvicorn() as plain,
        serving(arguments, Path(folder)) as (server, hidden),
    ):
        for rows in arguments.rows:
            results[rows] = measure(server, plain, rows, hidden, arguments.rounds)
            figures = {form: each.told() for form, each in results[rows].items()}
            print(
                json.dumps({"rows": rows, "hidden": hidden, "mib": round(rows * hidden * 2 / 2**20), **figures}),
                flush=True,
            )
    print(*(table(results) for table in (ttft_table, allowance_table, cpu_table)), sep="\n\n")


@contextmanager
def serving(arguments: argparse.Namespace, folder: Path) -> Iterator[tuple[RealServer, int]]:
    """A server for so many rows, and the width of one."""
    model: Path = arguments.model or synthetic(folder / "model", 2 * max(arguments.rows))
    hidden = int(AutoConfig.from_pretrained(model).get_text_config().hidden_size)
    options: dict[str, Any] = {"dtype": "bfloat16", "device": arguments.device, "load_format": arguments.load_format}
    options |= {"max_model_len": max(arguments.rows) + 64, "max_stored_bytes": 4 << 30}
    if arguments.device == "cuda":
        options["kv_cache_memory_bytes"] = None
    with RealServer(folder, model, **options) as server:
        yield server.wait_ready(), hidden


def synthetic(path: Path, max_positions: int) -> Path:
    tokenizer = build_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=1024, intermediate_size=256, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=max_positions, dtype="bfloat16",
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


# --- what is measured -------------------------------------------------------------------------------------------------


def measure(server: RealServer, plain: PlainUvicorn, rows: int, hidden: int, rounds: int) -> dict[str, Figures]:
    """Of each form, and of `plain` and `dropped` bodies of the sizes of `WIRE`, which have no cold."""
    bodies = Bodies(server.port, rows, hidden)
    found: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for attempt in range(rounds + 1):
        taken: dict[str, tuple[float, float, float]] = {}
        for form in FORMS:
            salt = f"{next(_salts):012d}"
            cold = ttft(server.port, bodies.of(form, salt), FORMS[form])
            again = bodies.of(form, salt)
            warm, cpu = counted(server, partial(ttft, server.port, again, FORMS[form]))
            taken[form] = cold, warm, cpu
        for form in WIRE:
            body = bodies.of(form, SALT)
            taken[f"{form} plain"] = (0.0, *plain.receive(body))
            taken[f"{form} dropped"] = (0.0, *counted(server, partial(dropped, server.port, body)))
        if attempt:  # the first round is the warm-up
            for name, each in taken.items():
                found[name].append(each)
    return {name: Figures(*map(middle, zip(*each, strict=True))) for name, each in found.items()}


def middle(seconds: Sequence[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 1)


def counted(server: RealServer, request: Callable[[], float]) -> tuple[float, float]:
    """What it takes, and CPU seconds of the API process."""
    before = cpu_seconds(server.process.pid)
    seconds = request()
    return seconds, cpu_seconds(server.process.pid) - before


class Bodies:
    """The same prompt in every form, made once; only the salt is put in anew."""

    def __init__(self, port: int, rows: int, hidden: int) -> None:
        file = tensor_file(rows, hidden)
        draw = random.Random(rows)
        stored = json.loads(post(port, UPLOAD, file, RAW))["id"]
        self._bodies = {
            "ids": completion([draw.randrange(4, 300) for _ in range(rows)]),
            "base64": completion([part(data=base64.b64encode(file).decode())]),
            "multipart": multipart({"request": completion([part(part="rows")]), "rows": file}),
            "stored": completion([part(id=stored)]),
        }

    def of(self, form: str, salt: str) -> bytes:
        return self._bodies[form].replace(SALT.encode(), salt.encode(), 1)


def ttft(port: int, body: bytes, content_type: str) -> float:
    """Seconds until the first event."""
    seconds, answer = exchange(port, COMPLETIONS, body, content_type)
    line = answer.partition(b"\n")[0]
    assert line.startswith(b"data: {") and b'"error"' not in line, line[:300]
    return seconds


# --- tables -----------------------------------------------------------------------------------------------------------


def ttft_table(results: Results) -> str:
    lines = ["| rows | TTFT, ms | ids | base64 | multipart | stored id |", "|---|---|---|---|---|---|"]
    for rows, found in results.items():
        for name in ("cold", "warm"):
            cells = [f"{getattr(found[form], name):.1f}" for form in FORMS]
            lines.append(f"| {rows:,} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def allowance_table(results: Results) -> str:
    """What each form is allowed to take: 1.05 times what ids take, and the transfer."""
    lines = [
        "| rows | | ids, cold | transfer | allowed | taken | over by | transfer, dropped | over by |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for rows, found in results.items():
        for form in (*WIRE, "stored"):
            ids, taken = found["ids"].cold, found[form].cold
            cells = [f"{ids:.1f}"]
            for baseline in ("plain", "dropped"):
                transfer = found[f"{form} {baseline}"].warm if form in WIRE else 0.0
                allowed = ALLOWED * ids + transfer
                over = f"{taken - allowed:+.1f}"
                cells += [f"{transfer:.1f}", *([f"{allowed:.1f}", f"{taken:.1f}"] if baseline == "plain" else []), over]
            lines.append(f"| {rows:,} | {form} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cpu_table(results: Results) -> str:
    lines = [
        "| rows | CPU, ms | the request | plain uvicorn | beyond it | body dropped | beyond it |",
        "|---|---|---|---|---|---|---|",
    ]
    for rows, found in results.items():
        for form in WIRE:
            cpu = found[form].cpu
            baselines = [found[f"{form} {baseline}"].cpu for baseline in ("plain", "dropped")]
            cells = [f"{cpu:.1f}", *(f"{each:.1f} | {cpu - each:.1f}" for each in baselines)]
            lines.append(f"| {rows:,} | {form} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
