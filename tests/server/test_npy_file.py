"""`.npy` files: one plain array in C order, whatever version wrote it."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from server import npy_file
from server.file_tensor import FileTensor, RowLimits
from tests.server import embedding_files as files
from tests.server.embedding_files import HIDDEN, MAX_ROWS, refusal, rows

VALUES = bytes(3 * HIDDEN * 4)


def read(payload: bytes) -> FileTensor:
    return npy_file.read_npy(memoryview(payload), RowLimits(HIDDEN, MAX_ROWS))


def array(*shape: int, dtype: str = "float32") -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = rows(*shape).numpy().astype(dtype)
    return found


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shape", [(3, HIDDEN), (1, HIDDEN), (1, MAX_ROWS, HIDDEN)])
def test_arrays_are_read(version: tuple[int, int], dtype: str, shape: tuple[int, ...]) -> None:
    values = array(*shape, dtype=dtype)
    with warnings.catch_warnings(action="ignore"):  # numpy warns of versions that it would not have needed
        payload = files.npy_file(values, version)
    found = read(payload)
    assert (found.num_rows, found.dtype) == (shape[-2], dtype)
    assert bytes(found.data) == values.tobytes()
    assert found.data.obj is payload


HEADERS_READ = {
    "as numpy writes it": b"{'descr': '<f4', 'fortran_order': False, 'shape': (3, 8), }       \n",
    "dense": b"{'descr':'<f4','fortran_order':False,'shape':(3,8)}",
    "in another order": b"{ 'shape' : ( 3 , 8 , ) , 'descr' : '<f4' , 'fortran_order' : False }\n",
}


@pytest.mark.parametrize("name", HEADERS_READ)
def test_headers_that_are_read(name: str) -> None:
    assert read(files.npy_file_of(HEADERS_READ[name], VALUES)).num_rows == 3


def header(descr: str = "'<f4'", order: str = "False", shape: str = "(3, 8)") -> bytes:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n".encode("latin-1")


NOT_PLAIN = "does not describe one plain array"

HEADERS = {
    "float64": (header("'<f8'"), "float32, float16 or bfloat16"),
    "int32": (header("'<i4'"), "float32, float16 or bfloat16"),
    "bfloat16 of ml_dtypes": (header("'<V2'"), "bfloat16 as safetensors"),
    "objects": (header("'|O'"), "float32, float16 or bfloat16"),
    "big-endian": (header("'>f4'"), "big-endian"),
    "native": (header("'=f4'"), "float32, float16 or bfloat16"),
    "record": (header("[('a', '<f4')]"), NOT_PLAIN),
    "Fortran order": (header(order="True"), "C order"),
    "order a number": (header(order="0"), NOT_PLAIN),
    "shape a list": (header(shape="[3, 8]"), NOT_PLAIN),
    "shape a number": (header(shape="24"), NOT_PLAIN),
    "no dimension": (header(shape="()"), "0 dimensions"),
    "one dimension": (header(shape="(24,)"), "1 dimension$"),
    "four dimensions": (header(shape="(1, 1, 3, 8)"), "4 dimensions"),
    "1,000 dimensions": (header(shape="(" + "1," * 1000 + ")"), "1000 dimensions"),
    "two prompts": (header(shape="(2, 3, 8)"), "leading dimension of 2"),
    "no rows": (header(shape="(0, 8)"), "no rows"),
    "narrow": (header(shape="(3, 7)"), "7 wide.*8"),
    "wide": (header(shape="(3, 9)"), "9 wide.*8"),
    "too many rows": (header(shape="(65, 8)"), "65 rows.*64"),
    "huge rows": (header(shape="(1152921504606846976, 8)"), "1152921504606846976 rows"),
    "19 digits": (header(shape="(9999999999999999999, 8)"), "64-bit"),
    "20 digits": (header(shape="(00000000000000000003, 8)"), NOT_PLAIN),
    "4,000 digits": (header(shape="(" + "9" * 3900 + ", 8)"), NOT_PLAIN),
    "negative rows": (header(shape="(-3, 8)"), NOT_PLAIN),
    "bool rows": (header(shape="(True, 8)"), NOT_PLAIN),
    "hexadecimal": (header(shape="(0x3, 8)"), NOT_PLAIN),
    "other digits": (header(shape="(\xb3, 8)"), NOT_PLAIN),
    "expression": (header(shape="(1+2, 8)"), NOT_PLAIN),
    "two commas": (header(shape="(3,, 8)"), NOT_PLAIN),
    "no comma": (header(shape="(3 8)"), NOT_PLAIN),
    "long dtype": (header("'<f4      '"), NOT_PLAIN),
    "key missing": (b"{'descr': '<f4', 'shape': (3, 8), }\n", NOT_PLAIN),
    "key twice": (header().replace(b"}", b"'shape': (3, 8)}"), "twice"),
    "another key": (header().replace(b"}", b"'more': (3, 8)}"), NOT_PLAIN),
    "no comma between": (header().replace(b"False,", b"False"), NOT_PLAIN),
    "open": (header().replace(b"}", b""), NOT_PLAIN),
    "never opened": (header().replace(b"{", b" "), NOT_PLAIN),
    "opened as a list": (header().replace(b"{", b"["), NOT_PLAIN),
    "something behind": (header() + b"1", NOT_PLAIN),
    "empty": (b"", NOT_PLAIN),
    "braces": (b"{}", NOT_PLAIN),
    "call": (b"__import__('os').system('true')", NOT_PLAIN),
    "nested deeply": (b"(" * 4000, NOT_PLAIN),
    "spaces": (b"{" + b" " * 4000, NOT_PLAIN),
    "more rows than sent": (header(shape="(4, 8)"), "128 bytes.*96"),
    "fewer rows than sent": (header(shape="(2, 8)"), "64 bytes.*96"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_other_headers_are_refused(name: str) -> None:
    text, match = HEADERS[name]
    refusal(lambda: read(files.npy_file_of(text, VALUES)), match)


@pytest.mark.parametrize("version", [(0, 0), (1, 1), (4, 0), (255, 255)])
def test_other_versions_are_refused(version: tuple[int, int]) -> None:
    refusal(lambda: read(files.npy_file_of(header(), VALUES, version)), "version 1.0, 2.0 or 3.0")


def test_headers_that_lie_about_their_length_are_refused() -> None:
    refusal(lambda: read(files.npy_file_of(header(), VALUES, length=300)), "longer than the file")
    refusal(lambda: read(files.npy_file_of(header(), VALUES, (2, 0), 2**32 - 1)), "longer than 4096 bytes")
    long = header() + b" " * npy_file.MAX_HEADER_BYTES
    assert read(files.npy_file_of(long[: npy_file.MAX_HEADER_BYTES], VALUES)).num_rows == 3
    refusal(lambda: read(files.npy_file_of(long[: npy_file.MAX_HEADER_BYTES + 1], VALUES)), "longer than 4096 bytes")


@pytest.mark.parametrize("size", range(6, 12))
def test_cut_headers_are_refused(size: int) -> None:
    refusal(lambda: read(files.npy_file(array())[:size]), "version|longer than|plain array")


@pytest.mark.parametrize("values", [VALUES[:-1], VALUES + b"\0", b""])
def test_missing_and_spare_values_are_refused(values: bytes) -> None:
    refusal(lambda: read(files.npy_file_of(header(), values)), f"96 bytes of values; {len(values)} follow")


def test_real_files_that_are_refused() -> None:
    refusal(lambda: read(files.npy_file(np.asfortranarray(array()))), "C order")
    refusal(lambda: read(files.npy_file(array().astype(">f4"))), "big-endian")
    refusal(lambda: read(files.npy_file(array().astype("float64"))), "float32, float16 or bfloat16")
    refusal(lambda: read(files.npy_file(np.array([[print] * HIDDEN]))), "float32, float16 or bfloat16")
