"""safetensors files: exactly one tensor, and a header that is as strict as the format."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save

from server import safetensors_file
from server.file_tensor import FileTensor, RowLimits
from tests.server import embedding_files as files
from tests.server.embedding_files import HIDDEN, MAX_ROWS, TORCH_DTYPES, refusal, rows
from tests.server.embedding_files import safetensors_file as build

SIZE = 3 * HIDDEN * 4
VALUES = bytes(SIZE)
ENTRY = {"dtype": "F32", "shape": [3, HIDDEN], "data_offsets": [0, SIZE]}


def read(payload: bytes) -> FileTensor:
    return safetensors_file.read_safetensors(memoryview(payload), RowLimits(HIDDEN, MAX_ROWS))


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("shape", [(3, HIDDEN), (1, HIDDEN), (1, MAX_ROWS, HIDDEN)])
def test_one_tensor_is_read(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = rows(*shape, dtype=dtype)
    payload = save({"prompt": tensor}, metadata={"made by": "a {test}"})
    assert safetensors_file.is_safetensors(memoryview(payload))
    found = read(payload)
    assert (found.num_rows, found.dtype) == (shape[-2], dtype)
    assert bytes(found.data) == files.raw(tensor)
    assert found.data.obj is payload


def test_the_hand_made_file_is_read() -> None:
    """What is changed below is what is refused."""
    assert read(build({"a": ENTRY}, VALUES)).num_rows == 3


def test_a_large_header_is_read_up_to_the_limit() -> None:
    def padded(size: int) -> bytes:
        empty = len(build({"__metadata__": {"note": ""}, "a": ENTRY})) - 8
        return build({"__metadata__": {"note": "x" * (size - empty)}, "a": ENTRY}, VALUES)

    assert read(padded(safetensors_file.MAX_HEADER_BYTES)).num_rows == 3
    refusal(lambda: read(padded(safetensors_file.MAX_HEADER_BYTES + 1)), "longer than 65536 bytes")


@pytest.mark.parametrize("length", [65537, 2**32, 2**63, 2**64 - 1])
def test_a_header_over_the_limit_is_refused(length: int) -> None:
    refusal(lambda: read(build({"a": ENTRY}, VALUES, length)), "longer than 65536 bytes")


def test_a_header_longer_than_the_file_is_refused() -> None:
    refusal(lambda: read(build({"a": ENTRY}, VALUES, 400)), "longer than the file")
    refusal(lambda: read(b"\x01"), "longer than the file")


NOT_JSON = "not a JSON object with distinct keys"

HEADERS = {
    "no JSON": (b"{", NOT_JSON),
    "no header": (b"", NOT_JSON),
    "no object": (b"[]", NOT_JSON),
    "no UTF-8": (b'{"\xff": 1}', NOT_JSON),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), NOT_JSON),
    "something behind": (b"{} {}", NOT_JSON),
    "nested deeply": (b'{"a":' + b"[" * 60_000, NOT_JSON),
    "nested deeply, closed": (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, NOT_JSON),
    "an integer of 60,000 digits": (b'{"a": ' + b"9" * 60_000 + b"}", NOT_JSON),
    "NaN": (b'{"a": NaN}', NOT_JSON),
    "NaN as metadata": (
        b'{"__metadata__": NaN, "a": {"dtype": "F32", "shape": [3, 8], "data_offsets": [0, 96]}}',
        NOT_JSON,
    ),
    "duplicate tensor": (
        b'{"a": {"dtype": "F32", "shape": [3, 8], "data_offsets": [0, 96]},'
        b' "a": {"dtype": "F32", "shape": [3, 8], "data_offsets": [0, 96]}}',
        NOT_JSON,
    ),
    "duplicate shape": (
        b'{"a": {"dtype": "F32", "shape": [99, 8], "shape": [3, 8], "data_offsets": [0, 96]}}',
        NOT_JSON,
    ),
    "no tensor": ({}, "exactly one tensor; this one holds 0"),
    "only metadata": ({"__metadata__": {}}, "exactly one tensor; this one holds 0"),
    "two tensors": ({"a": ENTRY, "b": ENTRY}, "exactly one tensor; this one holds 2"),
    "tensor is a number": ({"a": 1}, "dtype, shape and data_offsets"),
    "no dtype": ({"a": {"shape": [3, HIDDEN], "data_offsets": [0, SIZE]}}, "dtype, shape and data_offsets"),
    "more keys": ({"a": {**ENTRY, "strides": [1, 3]}}, "dtype, shape and data_offsets"),
    "float64": ({"a": {**ENTRY, "dtype": "F64"}}, "float32, float16 or bfloat16"),
    "int32": ({"a": {**ENTRY, "dtype": "I32"}}, "float32, float16 or bfloat16"),
    "dtype is a list": ({"a": {**ENTRY, "dtype": ["F32"]}}, "float32, float16 or bfloat16"),
    "shape is a string": ({"a": {**ENTRY, "shape": "38"}}, "not a list"),
    "shape is null": ({"a": {**ENTRY, "shape": None}}, "not a list"),
    "shape of 20,000 numbers": ({"a": {**ENTRY, "shape": [1] * 20_000}}, "20000 dimensions"),
    "huge rows": ({"a": {**ENTRY, "shape": [2**60, HIDDEN]}}, "1152921504606846976 rows"),
    "rows beyond 64 bits": ({"a": {**ENTRY, "shape": [2**63, HIDDEN]}}, "non-negative 64-bit"),
    "rows of 4,000 digits": (
        b'{"a": {"dtype": "F32", "shape": [' + b"9" * 4000 + b', 8], "data_offsets": [0, 96]}}',
        "64-bit",
    ),
    "negative rows": ({"a": {**ENTRY, "shape": [-3, -HIDDEN]}}, "non-negative 64-bit"),
    "bool rows": ({"a": {**ENTRY, "shape": [True, HIDDEN]}}, "non-negative 64-bit"),
    "float rows": ({"a": {**ENTRY, "shape": [3.0, HIDDEN]}}, "non-negative 64-bit"),
    "null rows": ({"a": {**ENTRY, "shape": [None, HIDDEN]}}, "non-negative 64-bit"),
    "no rows": ({"a": {**ENTRY, "shape": [0, HIDDEN], "data_offsets": [0, 0]}}, "no rows"),
    "one dimension": ({"a": {**ENTRY, "shape": [3 * HIDDEN]}}, "has 1 dimension$"),
    "no dimension": ({"a": {**ENTRY, "shape": []}}, "has 0 dimensions"),
    "four dimensions": ({"a": {**ENTRY, "shape": [1, 1, 3, HIDDEN]}}, "has 4 dimensions"),
    "two prompts": ({"a": {**ENTRY, "shape": [2, 3, HIDDEN]}}, "leading dimension of 2"),
    "narrow": ({"a": {**ENTRY, "shape": [3, HIDDEN - 1]}}, "7 wide.*8"),
    "wide": ({"a": {**ENTRY, "shape": [3, HIDDEN + 1]}}, "9 wide.*8"),
    "too many rows": ({"a": {**ENTRY, "shape": [MAX_ROWS + 1, HIDDEN]}}, "65 rows.*64"),
    "offsets too short": ({"a": {**ENTRY, "data_offsets": [0, SIZE - 1]}}, "data_offsets"),
    "offsets shifted": ({"a": {**ENTRY, "data_offsets": [4, SIZE + 4]}}, "data_offsets"),
    "offsets reversed": ({"a": {**ENTRY, "data_offsets": [SIZE, 0]}}, "data_offsets"),
    "offsets negative": ({"a": {**ENTRY, "data_offsets": [-SIZE, 0]}}, "data_offsets"),
    "offset a bool": ({"a": {**ENTRY, "data_offsets": [False, SIZE]}}, "data_offsets"),
    "offset a float": ({"a": {**ENTRY, "data_offsets": [0, float(SIZE)]}}, "data_offsets"),
    "three offsets": ({"a": {**ENTRY, "data_offsets": [0, SIZE, SIZE]}}, "data_offsets"),
    "offsets a number": ({"a": {**ENTRY, "data_offsets": SIZE}}, "data_offsets"),
    "more rows than sent": ({"a": {**ENTRY, "shape": [4, HIDDEN], "data_offsets": [0, 128]}}, "128 bytes.*96"),
    "fewer rows than sent": ({"a": {**ENTRY, "shape": [2, HIDDEN], "data_offsets": [0, 64]}}, "64 bytes.*96"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_other_headers_are_refused(name: str) -> None:
    header, match = HEADERS[name]
    refusal(lambda: read(build(header, VALUES)), match)


@pytest.mark.parametrize("values", [VALUES[:-1], VALUES + b"\0", b""])
def test_missing_and_spare_values_are_refused(values: bytes) -> None:
    refusal(lambda: read(build({"a": ENTRY}, values)), f"96 bytes of values; {len(values)} follow")


def test_real_files_that_are_refused() -> None:
    refusal(lambda: read(save({"a": rows(), "b": rows()})), "exactly one tensor; this one holds 2")
    refusal(lambda: read(save({"a": rows().double()})), "float32, float16 or bfloat16")
    refusal(lambda: read(save({"a": torch.zeros(3, HIDDEN, dtype=torch.int64)})), "float32, float16 or bfloat16")


@pytest.mark.parametrize("payload", [b"", b"12345678", b"12345678[", b"\x93NUMPY"])
def test_what_is_no_safetensors_file(payload: bytes) -> None:
    assert not safetensors_file.is_safetensors(memoryview(payload))
