"""`make bench`: the default model on this machine's CPU, beside Hugging Face `generate` in the same run.

Prints one JSON line a figure: decode tokens/s at batch 1, 8 and 32 of both (alternating, medians of the rounds, with
their ratio), linear layers plain and packed for oneDNN, the server's time from start to ready from a warm cache, and
the proportional set size of its processes.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM

from runner.config import RunnerConfig
from runner.default_model import default_model_path
from runner.engine import Engine
from runner.messages import Generate, SamplingParams
from runner.packed_linear import PackedLinear
from runner.sequence import Request
from tests import leash
from tests.server.harness import free_port

PROMPT, VOCAB = 128, 40_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    arguments = parser.parse_args()
    path = default_model_path()
    decode(path, arguments.batches, arguments.tokens, arguments.rounds)
    linears()
    start(path)


def report(**figures: Any) -> None:
    print(json.dumps(figures), flush=True)


def decode(path: Path, batches: list[int], tokens: int, rounds: int) -> None:
    """Tokens/s once every prompt is in."""
    engine = _engine(path)
    hf = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    for batch in batches:
        ours, theirs = [], []
        for attempt in range(rounds + 1):
            figures = _ours(engine, batch, tokens), _theirs(hf, batch, tokens)
            if attempt:  # the first is the warm-up
                ours.append(figures[0])
                theirs.append(figures[1])
        a, b = statistics.median(ours), statistics.median(theirs)
        report(figure="decode tok/s", batch=batch, ours=round(a, 1), hf_generate=round(b, 1), ratio=round(a / b, 2))


def _engine(path: Path) -> Engine:
    """All prompts are in at nearly the same time: nobody is shielded from them."""
    config = RunnerConfig(model=str(path), device="cpu", dtype="bfloat16", max_model_len=1024, max_num_seqs=32,
                          chunked_prefill_size=512, enable_prefix_caching=False)  # fmt: skip
    return Engine.load(config, lambda worker, output: None)


def _ours(engine: Engine, batch: int, tokens: int) -> float:
    draw = random.Random(0)
    for number in range(batch):
        ids = torch.tensor([draw.randrange(3, VOCAB) for _ in range(PROMPT)], dtype=torch.int32)
        engine.add(
            Request.from_message(
                Generate(0, number, 1, SamplingParams(tokens + 1, temperature=0.0)),
                [memoryview(ids.numpy().tobytes()), memoryview(b"")],
                vocab_size=engine.model.vocab_size,
                row_size=engine.model.hidden_size * 2,
                max_model_len=engine.limits.max_model_len,
                block_size=engine.info.block_size,
                private_cache=True,
            )
        )
    first = engine.stats().generated_tokens
    while engine.has_work and engine.stats().generated_tokens - first < batch:
        engine.step()
    made, began = engine.stats().generated_tokens, time.perf_counter()
    while engine.has_work:
        engine.step()
    return (engine.stats().generated_tokens - made) / (time.perf_counter() - began)


def _theirs(hf: Any, batch: int, tokens: int) -> float:
    ids = torch.randint(3, VOCAB, (batch, PROMPT))

    def seconds(count: int) -> float:
        began = time.perf_counter()
        hf.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
        )
        return time.perf_counter() - began

    with torch.inference_mode():
        prefill = seconds(1)
        return batch * tokens / (seconds(tokens + 1) - prefill)


@torch.inference_mode()
def linears() -> None:
    """µs a call of the default model's layer shapes, over enough copies of the weights to overflow the caches."""
    for inputs, outputs in ((576, 1536), (1536, 576), (576, 49_152)):
        copies = max(1, 60_000_000 // (inputs * outputs * 2))
        plain = [torch.nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16) for _ in range(copies)]
        packed = [PackedLinear(layer) for layer in plain]
        for rows in (1, 8, 32):
            x = torch.randn(1, rows, inputs, dtype=torch.bfloat16)
            figures = {"plain": _microseconds(plain, x), "packed": _microseconds(packed, x)}
            report(figure="linear us", shape=[inputs, outputs], rows=rows, **figures)


def _microseconds(layers: Sequence[torch.nn.Module], x: torch.Tensor) -> int:
    times = []
    for _ in range(6):
        began = time.perf_counter()
        for layer in layers:
            layer(x)
        times.append((time.perf_counter() - began) / len(layers))
    return round(statistics.median(times[1:]) * 1e6)


def start(path: Path) -> None:
    """Seconds from start to ready, and MiB of memory of the server and its runner together, after one answer."""
    port, began = free_port(), time.perf_counter()
    server = leash.start("server.cli", "serve", str(path), "--port", str(port))
    try:
        while not _is_ready(port):
            time.sleep(0.05)
        ready = time.perf_counter() - began
        body = {"prompt": "The capital of France is", "max_tokens": 16}
        httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60).raise_for_status()
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        sizes = [_pss(pid) for pid in (str(server.pid), *children)]
        report(figure="start", seconds=round(ready, 1), pss_mib=round(sum(sizes)), each=[round(size) for size in sizes])
    finally:
        server.terminate()
        leash.end(server)


def _is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def _pss(pid: str) -> float:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    (kib,) = [line.split()[1] for line in rollup.splitlines() if line.startswith("Pss:")]
    return int(kib) / 1024


if __name__ == "__main__":
    main()
