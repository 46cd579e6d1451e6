"""Damaged and hostile files: whatever arrives, what comes out is rows that keep every promise or an `EmbeddingError`.

A run mutates 500 files; `--long` (`make fuzz`) 10,000; the environment's FUZZ_COUNT any other number. Each is made from
its own number as seed, which the failure names.
"""

from __future__ import annotations

import base64
import os
import random
import struct
import time
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import save

from server.embeddings import EmbeddingError, Rows, decode_base64_embedding, decode_embedding
from tests.server import embedding_files as files
from tests.server.embedding_files import HIDDEN, MAX_ROWS, TORCH_DTYPES, rows

SHORT_COUNT, LONG_COUNT = 500, 10_000

SEEDS: list[bytes] = [
    files.torch_file(rows()),
    files.torch_file(rows(1, 4, HIDDEN, dtype="bfloat16")),
    files.torch_file(rows(9, HIDDEN, dtype="float16")[2:5]),
    files.torch_file(torch.nn.Parameter(rows())),
    files.rezipped(files.torch_file(rows())),
    files.torch_file_of(files.pickled(files.tensor_call())),
    save({"a": rows()}),
    save({"a": rows(1, 4, HIDDEN, dtype="bfloat16")}, metadata={"by": "test"}),
    save({"a": rows(dtype="float16"), "b": rows()}),
    files.npy_file(rows().numpy()),
    files.npy_file(rows(1, 4, HIDDEN, dtype="float16").numpy(), (2, 0)),
]
INTERESTING: tuple[int, ...] = (0, 1, 2, 3, 7, 8, 9, 63, 64, 65, 127, 128, 255, 256, 4096, 65535, 65536)
INTERESTING += (2**31 - 1, 2**31, 2**32 - 1, 2**60, 2**63 - 1, 2**63, 2**64 - 1)


def mutate(payload: bytes, rng: random.Random) -> bytes:
    """One change of the kinds that find bugs in parsers."""
    data = bytearray(payload)
    at = rng.randrange(len(data)) if data else 0
    other = rng.choice(SEEDS)
    start, end = sorted((rng.randrange(len(other)), rng.randrange(len(other))))
    match rng.randrange(9):
        case 0 if data:
            data[at] ^= 1 << rng.randrange(8)
        case 1 if data:
            data[at] = rng.randrange(256)
        case 2:  # cut off
            del data[at:]
        case 3:  # cut out
            del data[at : at + rng.choice((1, 2, 4, 8, 30))]
        case 4:  # splice with another file
            data[at:at] = other[start:end]
        case 5:
            data[at : at + end - start] = other[start:end]
        case 6:  # a length or an offset
            form = rng.choice("BHIQ")
            value = rng.choice(INTERESTING) % (1 << (8 * struct.calcsize(form)))
            data[at : at + struct.calcsize(form)] = struct.pack("<" + form, value)
        case 7:  # a number in JSON or in a Python literal
            digits = [index for index, byte in enumerate(data[:400]) if 0x30 <= byte <= 0x39]
            if digits:
                at = rng.choice(digits)
                data[at : at + 1] = rng.choice((b"-1", b"0", b"9" * 30, b"1e9", b"NaN", b"[", b"true", b"7"))
        case 8:  # twice the same
            data[at:at] = data[at : at + rng.choice((1, 2, 9, 46, 100))]
    return bytes(data)


def structured(rng: random.Random) -> bytes:
    """A valid container around a mutated description: what random bytes seldom reach."""
    values = bytes(rng.choice((0, 95, 96, 97, 128)))
    match rng.randrange(3):
        case 0:
            code = files.pickled(files.tensor_call())
            for _ in range(rng.choice((1, 1, 2, 4))):
                code = mutate(code, rng)
            return files.torch_file_of(code, values)
        case 1:
            header = b'{"a":{"dtype":"F32","shape":[3,8],"data_offsets":[0,96]}}'
            return files.safetensors_file(mutate(header, rng), values)
        case _:
            header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (3, 8), }\n"
            return files.npy_file_of(mutate(header, rng), values)


def fuzzed(seed: int) -> bytes:
    rng = random.Random(seed)
    if rng.random() < 0.3:
        return structured(rng)
    payload = rng.choice(SEEDS)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        payload = mutate(payload, rng)
    return payload


def check(found: Rows, dtype: str) -> None:
    assert 1 <= found.num_rows <= MAX_ROWS
    assert (found.hidden_size, found.dtype) == (HIDDEN, dtype)
    values = torch.frombuffer(bytearray(found.data), dtype=TORCH_DTYPES[dtype])
    assert values.numel() == found.num_rows * HIDDEN
    assert values.isfinite().all()
    assert len(found.digests) == 16 * found.num_rows


@pytest.fixture
def count(long_run: bool) -> int:
    return int(os.environ.get("FUZZ_COUNT", LONG_COUNT if long_run else SHORT_COUNT))


@pytest.mark.fuzz
@pytest.mark.timeout(600)
def test_mutated_files_are_rows_or_an_embedding_error(count: int) -> None:
    decoded = 0
    messages: set[str] = set()
    tracemalloc.start()
    try:
        for seed in range(count):
            payload = fuzzed(seed)
            dtype = tuple(TORCH_DTYPES)[seed % 3]
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            start = time.thread_time()
            try:
                found = decode_embedding(payload, hidden_size=HIDDEN, dtype=dtype, max_rows=MAX_ROWS)
            except EmbeddingError as error:
                messages.add(str(error))
                assert 0 < len(str(error).encode()) <= 1024, f"seed {seed}"
            except BaseException as error:
                raise AssertionError(f"seed {seed} raised {type(error).__name__}") from error
            else:
                decoded += 1
                check(found, dtype)
            assert time.thread_time() - start < 1.0, f"seed {seed}"
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before < 1_000_000, f"seed {seed}"
    finally:
        tracemalloc.stop()
    # Mutations that all die at the first check would prove nothing.
    assert decoded >= count // 20
    assert len(messages) >= min(20, count // 20)


@pytest.mark.fuzz
def test_mutated_base64_is_rows_or_an_embedding_error(count: int) -> None:
    decoded = 0
    for seed in range(count // 5):
        rng = random.Random(seed)
        text = base64.b64encode(fuzzed(seed) if seed % 2 else rng.choice(SEEDS))
        mutated: bytes | str = mutate(text, rng) if rng.random() < 0.7 else text
        if isinstance(mutated, bytes) and rng.random() < 0.5:
            mutated = mutated.decode("latin-1")
        try:
            check(decode_base64_embedding(mutated, hidden_size=HIDDEN, dtype="float16", max_rows=MAX_ROWS), "float16")
            decoded += 1
        except EmbeddingError as error:
            assert 0 < len(str(error).encode()) <= 1024, f"seed {seed}"
    assert decoded >= count // 50


@pytest.mark.fuzz
def test_every_prefix_of_every_file_is_refused() -> None:
    for payload in SEEDS:
        for size in range(len(payload)):
            with pytest.raises(EmbeddingError):
                decode_embedding(payload[:size], hidden_size=HIDDEN, dtype="float32", max_rows=MAX_ROWS)


@pytest.mark.fuzz
def test_random_bytes_behind_every_magic_are_refused() -> None:
    generator = np.random.default_rng(0)
    for magic in (b"", b"PK\x03\x04", b"\x93NUMPY\x01\x00", b"\x93NUMPY\x03\x00", b"\x40\0\0\0\0\0\0\0{", b"\x80\x02"):
        for size in range(0, 400, 7):
            with pytest.raises(EmbeddingError):
                decode_embedding(magic + generator.bytes(size), hidden_size=HIDDEN, dtype="float32", max_rows=MAX_ROWS)


def test_seeds_are_different_files() -> None:
    assert len(set(SEEDS)) == len(SEEDS)
    assert all(first != second for first, second in pairwise(fuzzed(seed) for seed in range(50)))
