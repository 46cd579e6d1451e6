"""Tensor files that nobody should send, each made from a random generator: what `requests` wraps into requests.

Two kinds: files that lie in one way that is known to have hurt somebody (`ATTACKS`), and good ones with random damage.
"""

from __future__ import annotations

import functools
import io
import pickle
import random
import struct
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save

from tests.models import HIDDEN_SIZE, MAX_POSITIONS
from tests.server import embedding_files as files
from tests.server.embedding_files import storage, tensor_call, torch_file, torch_file_of
from tests.server.test_embeddings_fuzz import INTERESTING

ROWS = 3
VALUES = bytes(ROWS * HIDDEN_SIZE * 4)
BOMB_BYTES = 64 << 20
"""What a bomb of some kilobytes would become."""
LARGE_BYTES = 12 << 20
"""Of files that are large on the wire, too."""

TRACE = Path(tempfile.gettempdir()) / "intarsia-fuzz-has-run-a-pickle"

Random = random.Random


def rows(count: int = ROWS, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, HIDDEN_SIZE, generator=torch.Generator().manual_seed(count)).to(dtype)


GOOD: list[bytes] = [
    save({"a": rows()}),
    save({"a": rows(1)}, {"by": "test"}),
    save({"a": rows(5, torch.bfloat16)[None]}),
    save({"a": rows(2, torch.float16)}),
    torch_file(rows()),
    torch_file(rows(4, torch.bfloat16)),
    torch_file(rows(9)[2:5]),
    torch_file_of(
        files.pickled(tensor_call(storage(numel=ROWS * HIDDEN_SIZE), 0, (ROWS, HIDDEN_SIZE), (HIDDEN_SIZE, 1))), VALUES
    ),
    files.npy_file(rows().numpy()),
    files.npy_file(rows(2).numpy().astype(np.float16), (2, 0)),
]
LONG_FILE = save({"a": rows(MAX_POSITIONS - 8)})


# --- safetensors ------------------------------------------------------------------------------------------------------


def _safetensors(shape: object, offsets: object, values: bytes = VALUES, **more: object) -> bytes:
    return files.safetensors_file({"a": {"dtype": "F32", "shape": shape, "data_offsets": offsets}, **more}, values)


def _offsets(rng: Random) -> bytes:
    size = len(VALUES)
    wrong = [[1, size + 1], [0, size - 1], [0, size + 4], [size, 0], [-4, size - 4], [0, 2**63], [2**64, 2**64 + size]]
    return _safetensors([ROWS, HIDDEN_SIZE], rng.choice([*wrong, [0], [0, size, size], None, "0", [0.0, size]]))


def _overlapping(rng: Random) -> bytes:
    entry = {"dtype": "F32", "shape": [ROWS, HIDDEN_SIZE], "data_offsets": [0, len(VALUES)]}
    return _safetensors(
        [ROWS, HIDDEN_SIZE], [0, len(VALUES)], b=entry | {"data_offsets": [rng.choice((0, 4, 64)), len(VALUES)]}
    )


def _huge_shape(rng: Random) -> bytes:
    sizes: list[int | bool] = [2**60, 2**58, 2**63, 2**64 + ROWS, 0, -1, True, 10**4000, MAX_POSITIONS + 1]
    shapes: list[list[int]] = [
        [2**60, 2**60],
        [1] * 5000,
        [ROWS, HIDDEN_SIZE, 1],
        [HIDDEN_SIZE, ROWS],
        [2, ROWS, HIDDEN_SIZE],
    ]
    shapes += [[size, HIDDEN_SIZE] for size in sizes]
    return _safetensors(rng.choice(shapes), [0, len(VALUES)])


def _header_length(rng: Random) -> bytes:
    good = rng.choice(GOOD[:4])
    return struct.pack("<Q", rng.choice([n for n in INTERESTING if n != struct.unpack("<Q", good[:8])[0]])) + good[8:]


def _header_json(rng: Random) -> bytes:
    text = rng.choice(
        [b'{"a":' * 20_000, b"{" + b"[" * 60_000, b'{"a":1e999}', b'{"a":NaN}', b'{"a":' + b"9" * 50_000 + b"}", b"{}"]
        + [
            b'{"a":{"dtype":"F32"}}',
            b'{"a":null}',
            b'{"\xff":1}',
            b'{"a":1,"a":2}',
            b'{"__metadata__":{}}',
            b"{" + b" " * 60_000,
        ]
        + [
            b'{"a":{"dtype":"%b","shape":[3,64],"data_offsets":[0,768]}}' % each
            for each in (b"F64", b"BOOL", b"F32" * 999)
        ]
    )
    return files.safetensors_file(text, VALUES)


# --- zip, pickle, torch -----------------------------------------------------------------------------------------------


def _pickle(rng: Random) -> bytes:
    """Code that would leave a trace, were it run."""
    calls = [
        files.Call(exec, "raise SystemExit(99)"),
        files.Call(open, str(TRACE), "w"),
        files.Call(eval, "1"),
    ]
    code = files.pickled(rng.choice(calls), rng.choice((0, 2, 4, 5)))
    return rng.choice(
        [code, torch_file_of(code, VALUES), pickle.dumps({"a": 1}), torch_file_of(code[: len(code) // 2])]
    )


def _deep_pickle(rng: Random) -> bytes:
    depth = rng.choice((1_000, 30_000))
    code = (
        b"\x80\x02" + rng.choice([b"]" * depth + b"a" * (depth - 1), b"(" * depth, b"2" * depth, b"}" * depth]) + b"."
    )
    return torch_file_of(code, VALUES)


def _strides(rng: Random) -> bytes:
    """A tensor that is larger than its storage, or lies elsewhere."""
    size = rng.choice([(ROWS, HIDDEN_SIZE), (MAX_POSITIONS, HIDDEN_SIZE), (2**60, HIDDEN_SIZE), (ROWS, HIDDEN_SIZE, 1)])
    stride = rng.choice(
        [(0, 0), (0, 1), (1, 0), (HIDDEN_SIZE, 1), (-HIDDEN_SIZE, 1), (2**62, 1), (1, ROWS), (2**64, 1)]
    )
    offset = rng.choice([0, 0, 0, 1, -1, ROWS * HIDDEN_SIZE, 2**62, 2**64])
    numel = rng.choice([ROWS * HIDDEN_SIZE, 0, 1, -1, 2**60, 2**64])
    return torch_file_of(files.pickled(tensor_call(storage(numel=numel), offset, size, stride)), VALUES)


def _bomb(rng: Random) -> bytes:
    """A small zip that unpacks into a large one."""
    return _zeros_in_zip(rng.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2)), rng.choice((2 << 20, BOMB_BYTES)))


@functools.cache
def _zeros_in_zip(compression: int, size: int) -> bytes:
    file, zeros = io.BytesIO(), bytes(1 << 20)
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("archive/data.pkl", files.pickled(tensor_call(storage(numel=size // 4))))
        with archive.open("archive/data/0", "w") as member:
            for _ in range(size >> 20):
                member.write(zeros)
    return file.getvalue()


def _expanded(rng: Random) -> bytes:
    """Ten kilobytes that load as gigabytes: one row, repeated by its stride."""
    return torch_file(rows(1).expand(rng.choice((MAX_POSITIONS, 2**24)), HIDDEN_SIZE))


def _zip_lies(rng: Random) -> bytes:
    """Sizes, offsets and counts in the directory that are not so, names that are there twice, members without end."""
    good = bytearray(GOOD[4])
    match rng.randrange(4):
        case 0:
            end = good.rindex(b"PK\x05\x06")
            struct.pack_into("<I", good, end + rng.choice((8, 12, 16)), rng.choice(INTERESTING) % 2**32)
        case 1:
            at = rng.choice(
                [at for at in range(len(good)) if bytes(good[at : at + 4]) in (b"PK\x01\x02", b"PK\x03\x04")]
            )
            struct.pack_into("<I", good, at + rng.choice((8, 10, 18, 20, 22, 24, 42)), rng.choice(INTERESTING) % 2**32)
        case 2:
            names = [("archive/data.pkl", b""), ("archive/data/0", VALUES)] * rng.choice((1, 2, 500))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of names that are there twice
                good[:] = files.zip_file(names)
        case _:
            good[:] = files.zip_file([(f"../../{'a/' * 100}{n}", b"") for n in range(rng.choice((1, 3000)))])
    return bytes(good)


# --- .npy, and what is no format at all -------------------------------------------------------------------------------


def _npy(rng: Random) -> bytes:
    shapes = [
        "(3, 64)",
        "(2**60, 64)",
        f"({2**60}, 64)",
        f"({2**64 + 3}, 64)",
        "(-1, 64)",
        "(3, 64,",
        "(3, 64), " * 999,
    ]
    kinds = ["'<f4'", "'>f4'", "'|O'", "'<f8'", "'<U9999'", "[('a', '<f4')]", "'f4,' * 9", "None", "__import__('os')"]
    shape, kind, order = rng.choice([*shapes, "(" * 5000]), rng.choice(kinds), rng.choice(["False", "True", "1"])
    header = f"{{'descr': {kind}, 'fortran_order': {order}, 'shape': {shape}, }}\n"
    version, length = rng.choice([(1, 0), (2, 0), (3, 0), (9, 9)]), rng.choice([None, None, 0, 65535])
    return files.npy_file_of(header.encode(), VALUES, version, length)


def _magic(rng: Random) -> bytes:
    magics = [
        b"",
        b"\x00",
        b"PK",
        b"PK\x03\x04",
        b"PK\x05\x06",
        b"\x93NUMPY",
        b"GGUF",
        b"\x80\x02",
        b"\x1f\x8b",
        b"PAR1",
        b"\x89HDF",
    ]
    return rng.choice(magics) + rng.randbytes(rng.choice((0, 1, 7, 8, 9, 100, 5000)))


def _not_finite(rng: Random) -> bytes:
    values = rows()
    values[rng.randrange(ROWS), rng.randrange(HIDDEN_SIZE)] = rng.choice([float("nan"), float("inf"), -float("inf")])
    return rng.choice([save({"a": values}), torch_file(values), files.npy_file(values.numpy())])


def _large(rng: Random) -> bytes:
    """As large as a body may nearly be, good only in its first bytes."""
    filler = bytes(LARGE_BYTES)
    return rng.choice(
        [
            GOOD[0] + filler,
            b"PK" + filler,
            filler,
            _safetensors([LARGE_BYTES // 256, HIDDEN_SIZE], [0, LARGE_BYTES], filler),
        ]
    )


Attack = Callable[[Random], bytes]
ATTACKS: tuple[Attack, ...] = (
    _offsets, _overlapping, _huge_shape, _header_length, _header_json, _pickle, _deep_pickle, _strides, _bomb,
    _expanded, _zip_lies, _npy, _magic, _not_finite,
)  # fmt: skip
RARE: tuple[Attack, ...] = (_large,)
"""Too slow to be many."""


def damaged(data: bytes, rng: Random) -> bytes:
    """One change of the kinds that find bugs in parsers."""
    changed = bytearray(data)
    at = rng.randrange(len(changed)) if changed else 0
    other = rng.choice(GOOD)
    start = rng.randrange(len(other))
    match rng.randrange(7):
        case 0 if changed:
            changed[at] ^= 1 << rng.randrange(8)
        case 1:
            del changed[at:]
        case 2:
            del changed[at : at + rng.choice((1, 2, 4, 8, 30))]
        case 3:
            changed[at:at] = other[start : start + rng.choice((1, 8, 64, 999))]
        case 4:
            form = rng.choice("BHIQ")
            value = rng.choice(INTERESTING) % (1 << (8 * struct.calcsize(form)))
            changed[at : at + struct.calcsize(form)] = struct.pack("<" + form, value)
        case 5:
            changed[at:at] = changed[at : at + rng.choice((1, 2, 46, 100))]
        case _:
            changed[at : at + 1] = rng.choice((b"-1", b"0", b"9" * 30, b"NaN", b"[", b"\r\n--", b"\x00"))
    return bytes(changed)


def hostile(rng: Random) -> bytes:
    """A file, good in one case of twenty."""
    kind = rng.random()
    if kind < 0.05:
        return rng.choice(GOOD)
    if kind < 0.06:
        return rng.choice(RARE)(rng)
    data = rng.choice(ATTACKS)(rng) if kind < 0.5 else rng.choice(GOOD)
    for _ in range(0 if kind < 0.45 else rng.choice((1, 1, 2, 5))):
        data = damaged(data, rng)
    return data
