"""`make bench-wire`: what it takes to get embeddings to the engine, in each form that a client can choose.

    python -m tests.bench.wire [--rows 1024 8192 24576] [--rounds 5] [--model FOLDER --device cuda --load-format dummy]

Time to first token of a streamed completion whose prompt is nothing but rows, sent as base64 in JSON, as a multipart
body, and as the id of a stored embedding, beside as many token ids; in turn, medians of the rounds. Cold: nothing of
the prompt is cached. Warm: all of it is, so that what is left is the way there. Bodies are made beforehand. Also CPU
milliseconds (user and system) of the API process for each request, and, as "dropped", for a body of the size of the
multipart one that is refused at its first bytes: what receiving alone costs.

Without --model: one layer with a single head, but rows of 1,024 values, so that a CPU can take 24,576 of them.
Prints one JSON line for each number of rows, then a table for docs/performance.md.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from tests.bench.frontend import cpu_seconds
from tests.integration.real_server import RealServer
from tests.models import build_tokenizer

UPLOAD = "/v1/prompt_embeds"
BOUNDARY = "5f3c1a9be0d24768b1c2d3e4f5061728"
"""As long as clients' own."""
FORM = f"multipart/form-data; boundary={BOUNDARY}"
RAW = "application/octet-stream"
HEADS = {"ids": "application/json", "base64": "application/json", "multipart": FORM, "stored": "application/json"}
SALT = "x" * 12
"""Stands for the salt in bodies that are made beforehand."""
_salts = itertools.count()


@dataclass(frozen=True)
class Figures:
    """Medians, milliseconds."""

    cold: float
    warm: float
    cpu: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 8192, 24576])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", type=Path, help="a local folder; default: a synthetic model for the CPU")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--load-format", default="auto")
    arguments = parser.parse_args()
    results: dict[int, dict[str, Figures]] = {}
    with tempfile.TemporaryDirectory() as folder, serving(arguments, Path(folder)) as (server, hidden):
        for rows in arguments.rows:
            results[rows] = measure(server, rows, hidden, arguments.rounds)
            figures = {form: vars(each) for form, each in results[rows].items()}
            print(
                json.dumps({"rows": rows, "hidden": hidden, "mib": round(rows * hidden * 2 / 2**20), **figures}),
                flush=True,
            )
    print(table(results))


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


def measure(server: RealServer, rows: int, hidden: int, rounds: int) -> dict[str, Figures]:
    bodies = Bodies(server.port, rows, hidden)
    cold: dict[str, list[float]] = {form: [] for form in HEADS}
    warm: dict[str, list[float]] = {form: [] for form in HEADS}
    cpu: dict[str, list[float]] = {form: [] for form in (*HEADS, "dropped")}
    for attempt in range(rounds + 1):
        for form in HEADS:
            salt = f"{next(_salts):012d}"
            first = ttft(server.port, bodies.of(form, salt), HEADS[form])
            before = cpu_seconds(server.process.pid)
            again = ttft(server.port, bodies.of(form, salt), HEADS[form])
            spent = cpu_seconds(server.process.pid) - before
            if attempt:  # the first round is the warm-up
                cold[form].append(first)
                warm[form].append(again)
                cpu[form].append(spent)
        before = cpu_seconds(server.process.pid)
        post(server.port, UPLOAD, bytes(bodies.size), RAW)
        if attempt:
            cpu["dropped"].append(cpu_seconds(server.process.pid) - before)
    found = {form: Figures(middle(cold[form]), middle(warm[form]), middle(cpu[form])) for form in HEADS}
    return found | {"dropped": Figures(0.0, 0.0, middle(cpu["dropped"]))}


def middle(seconds: Sequence[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 1)


class Bodies:
    """The same prompt in every form, made once; only the salt is put in anew."""

    def __init__(self, port: int, rows: int, hidden: int) -> None:
        file = tensor_file(rows, hidden)
        draw = random.Random(rows)
        stored = json.loads(post(port, UPLOAD, file, RAW))["id"]
        self.size = len(file)
        self._bodies = {
            "ids": completion([draw.randrange(4, 300) for _ in range(rows)]),
            "base64": completion([part(data=base64.b64encode(file).decode())]),
            "multipart": multipart({"request": completion([part(part="rows")]), "rows": file}),
            "stored": completion([part(id=stored)]),
        }

    def of(self, form: str, salt: str) -> bytes:
        return self._bodies[form].replace(SALT.encode(), salt.encode(), 1)


def completion(prompt: Any) -> bytes:
    # The salt comes first: it is looked for in up to a hundred megabytes.
    body = {"cache_salt": SALT, "max_tokens": 1, "stream": True, "temperature": 0, "prompt": prompt}
    return json.dumps(body).encode()


def part(**source: str) -> dict[str, str]:
    return {"type": "prompt_embeds", **source}


def tensor_file(rows: int, hidden: int) -> bytes:
    """bfloat16 rows as safetensors, written by hand: numpy has no such type."""
    values = np.random.default_rng(rows).standard_normal((rows, hidden), np.float32) * np.float32(0.02)
    bits = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    header = json.dumps({"rows": {"dtype": "BF16", "shape": [rows, hidden], "data_offsets": [0, len(bits)]}}).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + bits


def multipart(fields: dict[str, bytes]) -> bytes:
    head = '--{}\r\nContent-Disposition: form-data; name="{}"\r\n\r\n'
    parts = [head.format(BOUNDARY, name).encode() + value + b"\r\n" for name, value in fields.items()]
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


def post(port: int, path: str, body: bytes, content_type: str) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", path, body, {"Content-Type": content_type})
    try:
        return connection.getresponse().read()
    finally:
        connection.close()


def ttft(port: int, body: bytes, content_type: str) -> float:
    """Seconds until the first event, on a connection that is there already."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.connect()
    try:
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", body, {"Content-Type": content_type})
        response = connection.getresponse()
        line = response.readline()
        seconds = time.perf_counter() - began
        assert line.startswith(b"data: {") and b'"error"' not in line, line[:300]
        response.read()
        return seconds
    finally:
        connection.close()


def table(results: dict[int, dict[str, Figures]]) -> str:
    head = ["| rows | | ids | base64 | multipart | stored id | body dropped |", "|---|---|---|---|---|---|---|"]
    lines = []
    for rows, found in results.items():
        for name, label in (("cold", "TTFT cold"), ("warm", "TTFT warm"), ("cpu", "CPU of the API process")):
            cells = [f"{getattr(found[form], name):.1f}" for form in HEADS]
            dropped = f"{found['dropped'].cpu:.1f}" if name == "cpu" else ""
            lines.append(f"| {rows:,} | {label} | {' | '.join(cells)} | {dropped} |")
    return "\n".join(head + lines)


if __name__ == "__main__":
    main()
