"""Files as clients send them, and files as nobody should: what the tests of `server/embeddings.py` and of its readers
share. Real ones are written by torch, safetensors and numpy themselves."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3

from server.file_tensor import EmbeddingError

HIDDEN = 8
MAX_ROWS = 64

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def digests(data: bytes, row_bytes: int) -> bytes:
    """What `row_values.row_digests` promises: rows are hashed by sixteen, by more where that is at most a quarter of
    what is before them, by no more than 128 and than 256 KiB have; and the last byte counts them."""
    found, first, count = [], 0, len(data) // row_bytes
    while first < count:
        sizes = [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n == 1 or n * row_bytes <= 1 << 18]
        together = min(max(n for n in sizes if n <= 16 or 4 * n <= first), count - first)
        whole = blake3(data[first * row_bytes : (first + together) * row_bytes]).digest()[:16]
        found += [whole[:15] + bytes([whole[15] ^ place]) for place in range(together)]
        first += together
    return b"".join(found)


def rows(*shape: int, dtype: str = "float32", seed: int = 0) -> torch.Tensor:
    """Seeded normal values in `shape` ([3, HIDDEN] if left out)."""
    return torch.randn(shape or (3, HIDDEN), generator=torch.Generator().manual_seed(seed)).to(TORCH_DTYPES[dtype])


def raw(tensor: torch.Tensor) -> bytes:
    """The tensor's values in C order, as bytes."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def refusal(read: Callable[[], object], match: str) -> None:
    """`read` must raise an EmbeddingError that a client can be shown."""
    with pytest.raises(EmbeddingError, match=match) as caught:
        read()
    assert 0 < len(str(caught.value).encode()) <= 1024


# --- torch.save -----------------------------------------------------------------------------------------------------


def torch_file(value: object, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def members(file: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(file)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zip_file(contents: Iterable[tuple[str, bytes]], compression: int = zipfile.ZIP_STORED) -> bytes:
    """A zip file as another program would write it. Names may repeat."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in contents:
            archive.writestr(zipfile.ZipInfo(name), content, compression)
    return file.getvalue()


def rezipped(file: bytes, **replaced: bytes | None) -> bytes:
    """The torch file with other members: `pkl`, `byteorder`, `version`, `data0`; None leaves one out."""
    names = {"pkl": "archive/data.pkl", "data0": "archive/data/0"}
    changed = {names.get(key, f"archive/{key}"): content for key, content in replaced.items()}
    merged = {**members(file), **changed}
    return zip_file((name, content) for name, content in merged.items() if content is not None)


class Call:
    """Pickles as a call of `function`."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self._reduced = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self._reduced


class Persistent(tuple[object, ...]):
    """Pickles as a persistent id: how torch refers to a storage."""


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: object) -> tuple[object, ...] | None:
        return tuple(value) if isinstance(value, Persistent) else None


def pickled(value: object, protocol: int = 2) -> bytes:
    file = io.BytesIO()
    _Pickler(file, protocol).dump(value)
    return file.getvalue()


def storage(storage_type: object = torch.FloatStorage, key: object = "0", numel: object = 3 * HIDDEN) -> Persistent:
    return Persistent(("storage", storage_type, key, "cpu", numel))


def tensor_call(
    source: object = None, offset: object = 0, size: object = (3, HIDDEN), stride: object = (HIDDEN, 1)
) -> Call:
    """What torch pickles for a dense tensor, each part open to lies."""
    source = storage() if source is None else source
    return Call(torch._utils._rebuild_tensor_v2, source, offset, size, stride, False, OrderedDict())


def torch_file_of(pickle_bytes: bytes, values: bytes = bytes(3 * HIDDEN * 4)) -> bytes:
    """A torch file with this `data.pkl` and this storage 0."""
    return zip_file([("archive/data.pkl", pickle_bytes), ("archive/data/0", values), ("archive/version", b"3\n")])


def patched(file: bytes, at: int, form: str, value: int) -> bytes:
    """`file` with an integer overwritten at `at` (struct form, little-endian)."""
    packed = struct.pack("<" + form, value)
    assert file[at : at + len(packed)] != packed
    return file[:at] + packed + file[at + len(packed) :]


# --- safetensors and .npy -------------------------------------------------------------------------------------------


def safetensors_file(header: object, values: bytes = b"", length: int | None = None) -> bytes:
    """`header`: what is dumped as JSON, or the header's bytes. `length`: the header's length, if it shall be a lie."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded) if length is None else length) + encoded + values


def npy_file(array: np.ndarray[Any, Any], version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version, allow_pickle=True)
    return file.getvalue()


def npy_file_of(
    header: bytes, values: bytes = b"", version: tuple[int, int] = (1, 0), length: int | None = None
) -> bytes:
    size = len(header) if length is None else length
    return b"\x93NUMPY" + bytes(version) + struct.pack("<H" if version[0] == 1 else "<I", size) + header + values


def cut(data: bytes, *sizes: int) -> list[bytes]:
    """In pieces of these sizes in turn, until the last byte."""
    pieces: list[bytes] = []
    at = 0
    while at < len(data):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(data[at : at + size])
        at += size
    return pieces
