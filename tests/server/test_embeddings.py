"""Prompt embeddings, whatever the format, encoding and dtype: rows and digests, or an error fit for a client."""

from __future__ import annotations

import base64
import mmap
import threading
import time
import tracemalloc
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import save

from server.embeddings import EmbeddingError, Rows, _decoded, decode_base64_embedding, decode_embedding
from server.file_tensor import HEADER_ROOM
from server.pages import Gathered
from tests.server import embedding_files as files
from tests.server.embedding_files import HIDDEN, MAX_ROWS, TORCH_DTYPES, refusal, rows


def decode(
    payload: bytes | memoryview, dtype: str = "float32", hidden_size: int = HIDDEN, max_rows: int = MAX_ROWS
) -> Rows:
    return decode_embedding(payload, hidden_size=hidden_size, dtype=dtype, max_rows=max_rows)


def decode64(
    text: str | bytes | memoryview, dtype: str = "float32", hidden_size: int = HIDDEN, max_rows: int = MAX_ROWS
) -> Rows:
    return decode_base64_embedding(text, hidden_size=hidden_size, dtype=dtype, max_rows=max_rows)


FORMATS: dict[str, Callable[[torch.Tensor], bytes]] = {
    "torch": files.torch_file,
    "safetensors": lambda tensor: save({"prompt": tensor}),
    "npy": lambda tensor: files.npy_file(tensor.numpy()),
}
FORMAT_AND_DTYPE = [(name, dtype) for name in FORMATS for dtype in TORCH_DTYPES if (name, dtype) != ("npy", "bfloat16")]


@pytest.mark.parametrize("target", TORCH_DTYPES)
@pytest.mark.parametrize(("name", "source"), FORMAT_AND_DTYPE)
@pytest.mark.parametrize("shape", [(1, HIDDEN), (MAX_ROWS, HIDDEN), (1, 3, HIDDEN)])
def test_rows_are_the_tensor_in_the_models_dtype(name: str, source: str, target: str, shape: tuple[int, ...]) -> None:
    tensor = rows(*shape, dtype=source)
    payload = FORMATS[name](tensor)
    expected = tensor.to(TORCH_DTYPES[target])
    text = base64.b64encode(payload)
    for found in (decode(payload, target), decode64(text, target), decode64(text.decode(), target)):
        assert (found.num_rows, found.hidden_size, found.dtype) == (shape[-2], HIDDEN, target)
        assert bytes(found.data) == files.raw(expected)
        assert found.data.readonly
        assert found.digests == files.digests(files.raw(expected), expected.element_size() * HIDDEN)


@pytest.mark.parametrize("padding", range(3))
@pytest.mark.parametrize("target", ["bfloat16", "float32"])
def test_base64_in_pieces(padding: int, target: str) -> None:
    """Of some megabytes, whose values begin anywhere in a group of four characters."""
    tensor = rows(3000, 500, dtype="bfloat16")
    payload = save({"a": tensor}, {"b": "c" * 80})
    size = int.from_bytes(payload[:8], "little")
    payload = (size + padding).to_bytes(8, "little") + payload[8 : 8 + size] + b" " * padding + payload[8 + size :]
    text = base64.b64encode(payload)
    expected = decode(payload, target, 500, 3000)
    assert expected.data == files.raw(tensor.to(TORCH_DTYPES[target]))
    for each in (text, text.decode(), memoryview(text)):
        assert decode64(each, target, 500, 3000) == expected
    npy = base64.b64encode(files.npy_file(tensor.float().numpy()))
    assert decode64(npy, target, 500, 3000) == expected


def test_what_is_given_back_is_not_the_next_pieces() -> None:
    """Two pieces that share four characters, at the end of a page of a body's memory."""
    payload = np.random.default_rng(0).bytes(1 << 20)
    body = Gathered()
    body.add(base64.b64encode(payload))
    end = 200 * mmap.PAGESIZE // 4 * 3 - 1
    found = [b"".join(_decoded(body.view, *each)) for each in ((0, end), (end, len(payload)))]
    assert b"".join(found) == payload
    assert not any(body.view[mmap.PAGESIZE : 200 * mmap.PAGESIZE - mmap.PAGESIZE])


@pytest.mark.parametrize("at", [10, 700_000, 2_000_001, -3])
def test_base64_in_pieces_is_strict(at: int) -> None:
    payload = save({"a": rows(3000, 500, dtype="bfloat16")})
    text = base64.b64encode(payload)
    at %= len(text)
    broken = [text[:at] + other + text[at + 1 :] for other in (b"!", b"\n", b"-", b"\xff")] + [
        text[:at] + text[at + 1 :]
    ]
    broken.append(text[: at // 4 * 4] + b"AA==" + text[at // 4 * 4 + 4 :])
    for each in broken[: None if at < len(text) - 4 else -1]:
        refusal(partial(decode64, each, "bfloat16", 500, 3000), "base64|header|not known")
    for cut, found in ((text[:-4], "header promises"), (text + b"AAAA", "header promises|base64")):
        refusal(partial(decode64, cut, "bfloat16", 500, 3000), found)


def test_equal_rows_have_equal_digests_whatever_sent_them() -> None:
    tensor = rows(dtype="bfloat16")
    sent = [files.torch_file(tensor), save({"a": tensor}), save({"b": tensor.float()[None]})]
    assert len({decode(payload, "bfloat16").digests for payload in sent}) == 1
    assert decode(sent[0], "float32").digests != decode(sent[0], "bfloat16").digests


def test_any_buffer_of_bytes_is_a_payload() -> None:
    payload = files.torch_file(rows())
    expected = decode(payload)
    shifted = memoryview(b"x" + payload)[1:]
    words = np.frombuffer(payload + bytes(-len(payload) % 2), dtype=np.uint16).data
    assert decode(memoryview(payload)) == expected
    assert decode(shifted) == expected
    assert decode(memoryview(bytearray(payload))).data.readonly
    assert decode(words.cast("B")[: len(payload)]) == expected


def test_rows_of_the_models_dtype_are_a_view() -> None:
    payload = files.torch_file(rows())
    assert decode(payload).data.obj is payload


def test_rows_do_not_print_content() -> None:
    assert repr(decode(files.torch_file(rows()))) == "Rows(num_rows=3, hidden_size=8, dtype='float32')"


@pytest.mark.parametrize("name", FORMATS)
def test_shapes_are_checked_in_every_format(name: str) -> None:
    for shape, match in (
        ((3, HIDDEN + 1), "9 wide; this model's hidden size is 8"),
        ((3, HIDDEN - 1), "7 wide; this model's hidden size is 8"),
        ((0, HIDDEN), "no rows"),
        ((MAX_ROWS + 1, HIDDEN), "65 rows; at most 64"),
        ((HIDDEN,), "1 dimension$"),
        ((1, 1, 3, HIDDEN), "4 dimensions"),
        ((2, 3, HIDDEN), "leading dimension of 2"),
    ):
        payload = FORMATS[name](torch.ones(shape))
        refusal(partial(decode, payload), match)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused_in_every_format(name: str, value: float) -> None:
    tensor = rows()
    tensor[1, 2] = value
    refusal(lambda: decode(FORMATS[name](tensor), "bfloat16"), "row 1 of the prompt embedding contains NaN or Inf")


def test_values_too_large_for_the_model_are_refused() -> None:
    tensor = rows()
    tensor[2, 0] = -70000.0
    refusal(lambda: decode(files.torch_file(tensor), "float16"), "row 2 .* too large for this model's dtype, float16")
    assert decode(files.torch_file(tensor), "bfloat16").num_rows == 3


UNKNOWN = {
    "empty": (b"", "format is not known"),
    "text": (b"prompt", "format is not known"),
    "raw values": (bytes(3 * HIDDEN * 4), "format is not known"),
    "gzip": (b"\x1f\x8b\x08" + bytes(100), "format is not known"),
    "hdf5": (b"\x89HDF\r\n\x1a\n" + bytes(100), "format is not known"),
    "JSON": (b"[[0.1, 0.2]]" + bytes(100), "format is not known"),
    "empty zip": (b"PK\x05\x06" + bytes(18), "format is not known"),
    "prefixed zip": (b"#!" + files.torch_file(rows()), "format is not known"),
    "old torch.save": (files.torch_file(rows(), _use_new_zipfile_serialization=False), "not zip.* is refused"),
    "pickle": (files.pickled([1, 2, 3]), "bare pickle"),
    "pickle that runs": (files.pickled(files.Call(print, "executed")), "bare pickle"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_formats_are_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    payload, match = UNKNOWN[name]
    refusal(lambda: decode(payload), match)
    refusal(lambda: decode(payload), "safetensors, .npy or torch.save")
    assert capsys.readouterr().out == ""


# --- base64 ---------------------------------------------------------------------------------------------------------

PAYLOAD = files.npy_file(rows().numpy())
TEXT = base64.b64encode(PAYLOAD).decode()

NOT_BASE64 = {
    "line breaks": base64.encodebytes(PAYLOAD).decode(),
    "a last line break": TEXT + "\n",
    "a space": TEXT[:40] + " " + TEXT[40:],
    "padding missing": base64.b64encode(PAYLOAD + b"xx").decode().rstrip("="),
    "padding too long": TEXT + "====",
    "padding inside": base64.b64encode(b"1").decode() + TEXT,
    "cut": TEXT[:-1],
    "URL alphabet": TEXT[:40] + "-_--" + TEXT[44:],
    "data URI": "data:application/octet-stream;base64," + TEXT,
    "not ASCII": TEXT[:40] + "ä" + TEXT[41:],
    "not Latin-1": TEXT[:40] + "\U0001f600" + TEXT[41:],
    "a lone surrogate": TEXT[:40] + "\udc80" + TEXT[41:],
    "NUL": TEXT[:40] + "\0" + TEXT[41:],
    "text": "my secret prompt",
}


@pytest.mark.parametrize("name", NOT_BASE64)
def test_what_is_not_base64_is_refused(name: str) -> None:
    text = NOT_BASE64[name]
    refusal(lambda: decode64(text), "not valid base64")
    refusal(lambda: decode64(text.encode("utf-8", "surrogatepass")), "not valid base64")


def test_empty_base64_is_an_empty_file() -> None:
    refusal(lambda: decode64(""), "format is not known")


@pytest.mark.parametrize("hidden_size", [786_400, 786_401, 786_402, 3_000_000])
def test_long_base64_is_decoded_in_blocks(hidden_size: int) -> None:
    tensor = rows(1, hidden_size, dtype="float16")
    text = base64.b64encode(save({"a": tensor})).decode()
    assert len(text) > 1 << 20
    assert bytes(decode64(text, "float16", hidden_size).data) == files.raw(tensor)


@pytest.mark.parametrize("spare", ["AA==", "AAA="])
def test_padding_at_the_end_of_a_block_is_refused(spare: str) -> None:
    """Each block alone is valid base64."""
    block = "A" * ((1 << 20) - 4)
    for text in (block + spare + "AAAA", block + spare + block + "AAAA" + TEXT):
        refusal(partial(decode64, text, max_rows=1 << 20), "not valid base64")
    refusal(lambda: decode64(block + spare, max_rows=1 << 20), "format is not known")


def test_long_base64_is_refused_before_it_is_decoded() -> None:
    cap = 2 * HIDDEN * 4 + HEADER_ROOM
    text = "A" * ((cap + 2) // 3 * 4)
    refusal(lambda: decode64(text, max_rows=2), "format is not known")
    text += "!!!!"
    tracemalloc.start()
    try:
        refusal(lambda: decode64(text, max_rows=2), f"longer than {cap} bytes.*2 rows of 8")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 50_000


def test_long_files_are_refused() -> None:
    """A slice drags its whole storage along; there is an end to it."""
    cap = MAX_ROWS * HIDDEN * 4 + HEADER_ROOM
    assert decode(files.torch_file(rows(MAX_ROWS * 50, HIDDEN)[:5])).num_rows == 5
    refusal(lambda: decode(files.torch_file(rows(cap // 32, HIDDEN)[:5])), rf"longer than {cap} bytes.*clone\(\)")


# --- cost -----------------------------------------------------------------------------------------------------------


def test_a_small_file_of_a_huge_tensor_allocates_nothing() -> None:
    payload = files.torch_file(torch.zeros(1).expand(100_000, 4096))
    text = base64.b64encode(payload)
    assert len(payload) < 10_000
    tracemalloc.start()
    try:
        for max_rows in (1000, 1_000_000):
            refusal(partial(decode, payload, hidden_size=4096, max_rows=max_rows), "100000 rows|contiguous")
            refusal(partial(decode64, text, hidden_size=4096, max_rows=max_rows), "100000 rows|contiguous")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


@pytest.mark.parametrize(
    ("source", "target"), [("float32", "bfloat16"), ("float16", "float32"), ("bfloat16", "bfloat16")]
)
def test_decoding_allocates_at_most_twice_the_cap(source: str, target: str) -> None:
    max_rows, hidden_size = 2048, 1024
    text = base64.b64encode(save({"a": rows(max_rows, hidden_size, dtype=source)})).decode()
    tracemalloc.start()
    try:
        decode64(text, target, hidden_size, max_rows)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= 2 * max_rows * hidden_size * 4


@pytest.mark.parametrize("name", ["torch", "safetensors"])
def test_64_mib_take_no_time_a_value(name: str) -> None:
    """Takes 75 ms of CPU on an EPYC 9004, digests and writing them down included; the bound only notices per-value
    Python.
    Seen with `pytest -k 64_mib -s tests/server/test_embeddings.py`."""
    payload = FORMATS[name](torch.ones(8192, 4096, dtype=torch.bfloat16))
    start = time.process_time()
    decode(payload, "bfloat16", 4096, 8192)
    taken = time.process_time() - start
    print(f"{name}: 64 MiB of bfloat16 rows in {1000 * taken:.0f} ms of CPU")
    assert taken < 1.0


def test_threads_decode_at_once() -> None:
    payload = files.torch_file(rows(MAX_ROWS, HIDDEN))
    expected = decode(payload, "bfloat16")
    found: list[Rows | EmbeddingError] = []

    def work() -> None:
        for number in range(50):
            try:
                found.append(decode(payload if number % 2 else payload[:-1], "bfloat16"))
            except EmbeddingError as error:
                found.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(isinstance(each, EmbeddingError) for each in found) == 100
    assert sum(each == expected for each in found) == 100
