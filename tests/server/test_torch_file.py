"""`torch.save` files: what torch writes for a dense tensor is read, all else is refused and nothing is executed."""

from __future__ import annotations

import io
import os
import pickletools
import struct
import tracemalloc
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from server import stored_zip, torch_file
from server.file_tensor import FileTensor, RowLimits
from tests.server import embedding_files as files
from tests.server.embedding_files import HIDDEN, MAX_ROWS, TORCH_DTYPES, Call, Persistent, pickled, refusal, rows

LIMITS = RowLimits(HIDDEN, MAX_ROWS)
PLAIN = files.torch_file(rows())


def read(payload: bytes, limits: RowLimits = LIMITS) -> FileTensor:
    return torch_file.read_torch(memoryview(payload), limits)


def refuse(payload: bytes, match: str) -> None:
    refusal(lambda: read(payload), match)


# --- what is read ---------------------------------------------------------------------------------------------------

DENSE = {
    "plain": rows(),
    "one row": rows(1, HIDDEN),
    "batch of one": rows(1, 5, HIDDEN),
    "rows of a larger tensor": rows(50, HIDDEN)[7:12],
    "the first rows of a larger tensor": rows(50, HIDDEN)[:5],
    "a storage of more than 65,535 values": rows(9000, HIDDEN)[8990:],
    "one of a batch": rows(4, 5, HIDDEN)[2:3],
    "one row of every seventh": rows(50, HIDDEN)[14::49],
    "requires grad": rows().requires_grad_(),
    "not a leaf": rows().requires_grad_() * 2,
    "parameter": torch.nn.Parameter(rows()),
    "frozen parameter": torch.nn.Parameter(rows(), requires_grad=False),
    "slice of a parameter": torch.nn.Parameter(rows(9, HIDDEN))[2:4],
}


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("name", DENSE)
def test_dense_tensors_are_read(name: str, dtype: str) -> None:
    tensor = DENSE[name] if DENSE[name].dtype == TORCH_DTYPES[dtype] else DENSE[name].to(TORCH_DTYPES[dtype])
    found = read(files.torch_file(tensor))
    assert (found.num_rows, found.dtype) == (tensor.shape[-2], dtype)
    assert bytes(found.data) == files.raw(tensor)


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("view", [slice(7, 12), slice(0, 5)])
def test_slices_are_read_in_every_dtype(dtype: str, view: slice) -> None:
    tensor = rows(50, HIDDEN, dtype=dtype)[view]
    assert bytes(read(files.torch_file(tensor)).data) == files.raw(tensor)


def test_the_rows_are_a_view_of_the_payload() -> None:
    assert read(PLAIN).data.obj is PLAIN


def test_a_file_has_its_own_name_as_folder(tmp_path: Path) -> None:
    torch.save(rows(), tmp_path / "soft prompt ä.pt")
    assert bytes(read((tmp_path / "soft prompt ä.pt").read_bytes()).data) == files.raw(rows())


def test_files_of_older_torch_are_read() -> None:
    """Before 2.1 there was no `byteorder`, later came `.format_version`, `.storage_alignment` and `.data`."""
    contents = files.members(PLAIN)
    oldest = {name: contents[name] for name in ("archive/data.pkl", "archive/data/0", "archive/version")}
    assert bytes(read(files.zip_file(oldest.items())).data) == files.raw(rows())


def test_files_without_crcs_are_read() -> None:
    torch.serialization.set_crc32_options(False)
    try:
        payload = files.torch_file(rows())
    finally:
        torch.serialization.set_crc32_options(True)
    assert payload != PLAIN
    assert bytes(read(payload).data) == files.raw(rows())


def test_tensors_saved_from_another_device_are_read() -> None:
    source = Persistent(("storage", torch.FloatStorage, "0", "cuda:3", 3 * HIDDEN))
    payload = files.torch_file_of(pickled(files.tensor_call(source)), files.raw(rows()))
    assert bytes(read(payload).data) == files.raw(rows())


def test_the_walk_knows_what_torch_writes() -> None:
    """The files made by hand below are the same pickles as torch's, so that what they change is what is refused."""
    by_torch = [(op.name, argument) for op, argument, _ in pickletools.genops(files.members(PLAIN)["archive/data.pkl"])]
    by_hand = [(op.name, argument) for op, argument, _ in pickletools.genops(pickled(files.tensor_call()))]
    assert by_hand == by_torch
    assert bytes(read(files.torch_file_of(pickled(files.tensor_call()), files.raw(rows()))).data) == files.raw(rows())


# --- tensors that are refused ---------------------------------------------------------------------------------------


class Note:
    pass


def _with_attribute(tensor: torch.Tensor) -> torch.Tensor:
    tensor.note = 1  # type: ignore[attr-defined]
    return tensor


TENSORS = {
    "expanded": (rows(1, HIDDEN).expand(5, HIDDEN), r"\.contiguous\(\)"),
    "expanded columns": (rows(5, 1).expand(5, HIDDEN), r"\.contiguous\(\)"),
    "transposed": (rows(HIDDEN, 5).t(), r"\.contiguous\(\)"),
    "columns": (rows(5, 2 * HIDDEN)[:, :HIDDEN], r"\.contiguous\(\)"),
    "every second row": (rows(10, HIDDEN)[::2], r"\.contiguous\(\)"),
    "float64": (rows().double(), "float32, float16 or bfloat16"),
    "int64": (torch.zeros(3, HIDDEN, dtype=torch.int64), "float32, float16 or bfloat16"),
    "bool": (torch.zeros(3, HIDDEN, dtype=torch.bool), "float32, float16 or bfloat16"),
    "complex": (torch.zeros(3, HIDDEN, dtype=torch.complex64), "float32, float16 or bfloat16"),
    "float8": (rows().to(torch.float8_e4m3fn), "float32, float16 or bfloat16"),
    "uint16": (torch.zeros(3, HIDDEN, dtype=torch.uint16), "float32, float16 or bfloat16"),
    "sparse": (rows().to_sparse(), r"sparse.*to_dense\(\)"),
    "sparse, no values": (torch.zeros(3, HIDDEN).to_sparse(), r"sparse.*to_dense\(\)"),
    "negated view": (torch._neg_view(rows()), "other than one dense tensor"),
    "meta": (torch.zeros(3, HIDDEN, device="meta"), "other than one dense tensor"),
    "attribute": (_with_attribute(rows()), "other than one dense tensor"),
    "parameter with attribute": (_with_attribute(torch.nn.Parameter(rows())), "other than one dense tensor"),
    "list": ([rows()], "other than one dense tensor"),
    "two tensors": ((rows(), rows()), "other than one dense tensor"),
    "dict": ({"prompt_embeds": rows()}, "other than one dense tensor"),
    "state dict": (torch.nn.Linear(2, 2).state_dict(), "other than one dense tensor"),
    "module": (torch.nn.Linear(2, 2), "other than one dense tensor"),
    "storage": (rows().untyped_storage(), "dtype|other than"),
    "number": (3, "other than one dense tensor"),
    "string": ("os.system", "other than one dense tensor"),
    "object": (Note(), "other than one dense tensor"),
    "no rows": (rows()[:0], "no rows"),
    "one dimension": (rows(HIDDEN), "1 dimension$"),
    "four dimensions": (rows(1, 1, 3, HIDDEN), "4 dimensions"),
    "two prompts": (rows(2, 3, HIDDEN), "leading dimension of 2"),
    "narrow": (rows(3, HIDDEN - 1), "7 wide.*8"),
    "wide": (rows(3, HIDDEN + 1), "9 wide.*8"),
    "too many rows": (rows(MAX_ROWS + 1, HIDDEN), "65 rows.*64"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_other_tensors_are_refused(name: str) -> None:
    value, match = TENSORS[name]
    refuse(files.torch_file(value), match)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_compressed_sparse_rows_are_refused() -> None:
    refuse(files.torch_file(rows().to_sparse_csr()), r"sparse.*to_dense\(\)")


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_other_pickle_protocols_are_refused(protocol: int) -> None:
    refuse(files.torch_file(rows(), pickle_protocol=protocol), "protocol 2")


def test_a_small_file_of_a_huge_tensor_allocates_nothing() -> None:
    """1.5 KB that torch.load turns into 1.6 GB for whoever asks for contiguous values."""
    payload = files.torch_file(torch.zeros(1).expand(100_000, 4096))
    assert len(payload) < 10_000
    tracemalloc.start()
    try:
        refusal(lambda: read(payload, RowLimits(4096, 1_000_000)), r"\.contiguous\(\)")
        refusal(lambda: read(payload, RowLimits(4096, 1000)), "100000 rows.*1000")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


# --- pickles that lie -----------------------------------------------------------------------------------------------

OUTSIDE = "outside of its storage"
ANOTHER_SIZE = "storage is missing or has another size"
NOT_INTEGERS = "non-negative 64-bit integers"
NOT_ONE = "other than one dense tensor"

LIES = {
    "huge rows": (files.tensor_call(size=(2**60, HIDDEN)), "1152921504606846976 rows"),
    "beyond 64 bits": (files.tensor_call(size=(2**63, HIDDEN)), "damaged"),
    "negative rows": (files.tensor_call(size=(-3, HIDDEN)), NOT_INTEGERS),
    "negative width": (files.tensor_call(size=(-3, -HIDDEN)), NOT_INTEGERS),
    "bool rows": (files.tensor_call(size=(True, HIDDEN)), NOT_INTEGERS),
    "string rows": (files.tensor_call(size=("3", HIDDEN)), NOT_INTEGERS),
    "nested size": (files.tensor_call(size=((3, HIDDEN), HIDDEN)), NOT_INTEGERS),
    "no size": (files.tensor_call(size=()), "0 dimensions"),
    "size is a number": (files.tensor_call(size=3), NOT_ONE),
    "stride is a number": (files.tensor_call(stride=1), NOT_ONE),
    "no strides": (files.tensor_call(stride=()), r"\.contiguous\(\)"),
    "a stride too many": (files.tensor_call(stride=(99, HIDDEN, 1)), r"\.contiguous\(\)"),
    "a stride too few": (files.tensor_call(size=(1, HIDDEN), stride=(1,)), r"\.contiguous\(\)"),
    "negative strides": (files.tensor_call(stride=(-HIDDEN, -1)), r"\.contiguous\(\)"),
    "more rows than stored": (files.tensor_call(size=(4, HIDDEN)), OUTSIDE),
    "offset behind the end": (files.tensor_call(offset=1), OUTSIDE),
    "negative offset": (files.tensor_call(offset=-8), OUTSIDE),
    "bool offset": (files.tensor_call(offset=False), OUTSIDE),
    "string offset": (files.tensor_call(offset="0"), OUTSIDE),
    "storage larger than stored": (files.tensor_call(files.storage(numel=4 * HIDDEN)), ANOTHER_SIZE),
    "storage of 2^60": (files.tensor_call(files.storage(numel=2**60)), ANOTHER_SIZE),
    "negative storage": (files.tensor_call(files.storage(numel=-24)), ANOTHER_SIZE),
    "string storage size": (files.tensor_call(files.storage(numel="24")), ANOTHER_SIZE),
    "storage size a call": (files.tensor_call(files.storage(numel=OrderedDict())), ANOTHER_SIZE),
    "missing storage": (files.tensor_call(files.storage(key="1")), ANOTHER_SIZE),
    "storage elsewhere": (files.tensor_call(files.storage(key="../version")), ANOTHER_SIZE),
    "storage key a number": (files.tensor_call(files.storage(key=0)), NOT_ONE),
    "storage without a type": (files.tensor_call(files.storage("torch FloatStorage")), NOT_ONE),
    "storage not persistent": (files.tensor_call(("storage", torch.FloatStorage, "0", "cpu", 24)), NOT_ONE),
    "something else persistent": (files.tensor_call(Persistent(("module", "a", "b"))), NOT_ONE),
    "only a storage": (files.storage(), NOT_ONE),
    "only hooks": (OrderedDict(), NOT_ONE),
    "hooks": (Call(torch._utils._rebuild_parameter, files.tensor_call(), True, OrderedDict(a=1)), NOT_ONE),
    "hooks of another type": (Call(torch._utils._rebuild_parameter, files.tensor_call(), True, ()), NOT_ONE),
    "parameter of nothing": (Call(torch._utils._rebuild_parameter, (), True, OrderedDict()), NOT_ONE),
    "tensor with another hook": (
        Call(torch._utils._rebuild_tensor_v2, files.storage(), 0, (3, HIDDEN), (HIDDEN, 1), False, 0),
        NOT_ONE,
    ),
    "tensor without hooks": (
        Call(torch._utils._rebuild_tensor_v2, files.storage(), 0, (3, HIDDEN), (HIDDEN, 1), False),
        NOT_ONE,
    ),
    "hooks called with a tensor": (Call(OrderedDict, files.tensor_call()), NOT_ONE),
    "loads": (Call(torch.load, "/etc/passwd"), NOT_ONE),
    "evaluates": (Call(eval, "1"), NOT_ONE),
}


@pytest.mark.parametrize("name", LIES)
def test_pickles_that_lie_are_refused(name: str) -> None:
    value, match = LIES[name]
    refuse(files.torch_file_of(pickled(value)), match)


def test_size_of_zero_rows_of_the_walk_is_an_integer() -> None:
    """LONG1 with no bytes is 0."""
    code = pickled(files.tensor_call()).replace(b"K\x03K\x08\x86", b"\x8a\x00K\x08\x86")
    refuse(files.torch_file_of(code), "no rows")


def test_nothing_is_executed(tmp_path: Path) -> None:
    target = tmp_path / "executed"
    for value in (Call(os.system, f"touch {target}"), files.tensor_call(Call(os.mkdir, str(target)))):
        refuse(files.torch_file_of(pickled(value)), NOT_ONE)
        refuse(files.rezipped(PLAIN, pkl=pickled(value)), NOT_ONE)
    assert not target.exists()


STORAGE_TUPLE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x18t"

CODES = {
    "empty": (b"", "damaged"),
    "no stop": (b"\x80\x02)", "damaged"),
    "no protocol": (b")R.", "protocol 2"),
    "nothing": (b"\x80\x02.", "damaged"),
    "something after the stop": (pickled(files.tensor_call()) + b".", NOT_ONE),
    "something below the tensor": (b"\x80\x02)" + pickled(files.tensor_call())[2:], NOT_ONE),
    "giant memo index": (b"\x80\x02)r\xff\xff\xff\xff.", NOT_ONE),
    "memo index 256": (b"\x80\x02)r\x00\x01\x00\x00.", NOT_ONE),
    "memo of nothing": (b"\x80\x02q\x00.", "damaged"),
    "memo of a mark": (b"\x80\x02(q\x00.", "damaged"),
    "missing memo": (b"\x80\x02h\x00.", "damaged"),
    "missing long memo": (b"\x80\x02j\xff\xff\xff\x7f.", "damaged"),
    "tuple of nothing": (b"\x80\x02\x85.", "damaged"),
    "tuple of a mark": (b"\x80\x02(\x85.", "damaged"),
    "tuple without a mark": (b"\x80\x02))t.", "damaged"),
    "call of nothing": (b"\x80\x02)R.", "damaged"),
    "deep stack": (b"\x80\x02" + b")" * 65 + b".", NOT_ONE),
    "deep marks": (b"\x80\x02" + b"(" * 65 + b".", NOT_ONE),
    "text longer than the pickle": (b"\x80\x02X\xff\xff\xff\x7fa.", "damaged"),
    "text that is no text": (b"\x80\x02X\x01\x00\x00\x00\xff.", "damaged"),
    "name that is no text": (b"\x80\x02c\xff\n\xff\n.", "damaged"),
    "name without an end": (b"\x80\x02ctorch\nFloatStorage.", "damaged"),
    "long of 255 bytes": (b"\x80\x02\x8a\xff" + b"\xff" * 255 + b".", "damaged"),
    "long of 9 bytes": (b"\x80\x02\x8a\x09" + b"\x00" * 9 + b".", "damaged"),
    "cut integer": (b"\x80\x02J\x00\x00", "damaged"),
    "build": (b"\x80\x02))b.", NOT_ONE),
    "inst": (b"\x80\x02(ios\nsystem\n.", NOT_ONE),
    "newobj": (b"\x80\x02ctorch\nFloatStorage\n)\x81.", NOT_ONE),
    "stack global": (b"\x80\x02X\x02\x00\x00\x00osX\x06\x00\x00\x00system\x93.", NOT_ONE),
    "extension": (b"\x80\x02\x82\x01.", NOT_ONE),
    "list": (b"\x80\x02].", NOT_ONE),
    "textual persistent id": (b"\x80\x02P0\n.", NOT_ONE),
    "bytearray of 2^63": (b"\x80\x02\x96\xff\xff\xff\xff\xff\xff\xff\x7f.", NOT_ONE),
    "frame": (b"\x80\x02\x95\xff\xff\xff\xff\xff\xff\xff\x7f.", NOT_ONE),
    "persistent id of nothing": (b"\x80\x02Q.", "damaged"),
    "storage alone": (b"\x80\x02" + STORAGE_TUPLE + b"Q.", NOT_ONE),
}


@pytest.mark.parametrize("name", CODES)
def test_damaged_and_hostile_pickles_are_refused(name: str) -> None:
    code, match = CODES[name]
    refuse(files.torch_file_of(code), match)


@pytest.mark.parametrize(("index", "accepted"), [(255, True), (256, False), (2**31 - 1, False), (2**32 - 1, False)])
def test_the_memo_is_bounded(index: int, accepted: bool) -> None:
    code = pickled(files.tensor_call())
    code = code.replace(b"q\x01", b"r" + struct.pack("<I", index))
    assert code.count(b"r" + struct.pack("<I", index)) == 1
    if accepted:
        assert read(files.torch_file_of(code)).num_rows == 3
    else:
        refuse(files.torch_file_of(code), NOT_ONE)


def test_a_memo_bomb_costs_nothing() -> None:
    """Forty tuples, each of the one before twice: 2^40 items to anyone who compares, hashes or prints them."""
    bomb = b"\x80\x02)q\x00" + b"".join(bytes([0x68, i, 0x68, i, 0x86, 0x71, i + 1, 0x85, 0x85]) for i in range(40))
    code = pickled(files.tensor_call()).replace(b"K\x03K\x08\x86", b"h\x28h\x28\x86").removeprefix(b"\x80\x02")
    tracemalloc.start()
    try:
        refuse(files.torch_file_of(bomb + b"(t" + code), "integers|one dense")
        refuse(files.torch_file_of(b"\x80\x02" + b")" + b"\x85" * 4000 + b"."), NOT_ONE)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000


def test_nested_tuples_as_strides_are_refused() -> None:
    nested: tuple[object, ...] = ()
    for _ in range(60):
        nested = (nested, nested)
    refuse(files.torch_file_of(pickled(files.tensor_call(stride=(nested, 1)))), r"\.contiguous\(\)")
    refuse(files.torch_file_of(pickled(files.tensor_call(size=(nested, HIDDEN)))), NOT_INTEGERS)


@pytest.mark.parametrize(("size", "match"), [(4096, NOT_ONE), (4097, "over 4096 bytes")])
def test_long_pickles_are_refused(size: int, match: str) -> None:
    code = pickled(files.tensor_call())
    refuse(files.torch_file_of(code + bytes(size - len(code))), match)


# --- zip files ------------------------------------------------------------------------------------------------------

DIRECTORY = PLAIN.index(b"PK\x01\x02")
END = len(PLAIN) - 22
DAMAGED = "zip file is damaged"


def test_compressed_members_are_refused() -> None:
    refuse(files.zip_file(files.members(PLAIN).items(), zipfile.ZIP_DEFLATED), "compressed")


def test_a_zip_bomb_is_refused() -> None:
    contents = {**files.members(PLAIN), "archive/data/0": bytes(100_000_000)}
    bomb = files.zip_file(contents.items(), zipfile.ZIP_DEFLATED)
    tracemalloc.start()
    try:
        refuse(bomb, "compressed")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", ["archive/data.pkl", "archive/data/0"])
def test_two_members_of_one_name_are_refused(name: str) -> None:
    contents = files.members(PLAIN)
    refuse(files.zip_file([*contents.items(), (name, contents[name])]), "two members of the same name")


def test_two_pickles_are_refused() -> None:
    contents = files.members(PLAIN)
    refuse(
        files.zip_file([*contents.items(), ("other/data.pkl", contents["archive/data.pkl"])]), "not written by torch"
    )


def test_other_zip_files_are_refused() -> None:
    file = io.BytesIO()
    np.savez(file, rows().numpy())
    refuse(file.getvalue(), "not written by torch")


def test_big_endian_values_are_refused() -> None:
    refuse(files.rezipped(PLAIN, byteorder=b"big"), "big-endian")


def test_many_members_are_refused() -> None:
    contents = list(files.members(PLAIN).items())
    spare = [(f"archive/{number}", b"") for number in range(stored_zip.MAX_MEMBERS - len(contents))]
    assert read(files.zip_file(contents + spare)).num_rows == 3
    refuse(files.zip_file([*contents, *spare, ("archive/more", b"")]), "64 members")


def test_a_long_directory_is_refused() -> None:
    contents = files.members(PLAIN)
    name = "x" * 60_000
    assert read(files.zip_file([*contents.items(), (name, b"")])).num_rows == 3
    refuse(files.zip_file([*contents.items(), (name, b""), (name[1:], b"")]), "65536 bytes")


@pytest.mark.parametrize("size", [*range(0, 30), 100, END, len(PLAIN) - 1])
def test_cut_files_are_refused(size: int) -> None:
    refuse(PLAIN[:size], "cut short")


def test_something_after_the_directory_is_refused() -> None:
    refuse(PLAIN + b"\0", "something follows")
    refuse(files.patched(PLAIN, END + 20, "H", 1) + b"\0", "cut short|something follows")
    refuse(files.patched(PLAIN, END + 20, "H", 1), "cut short|something follows")


EDITS = {
    "disk number": (END + 4, "H", 1, DAMAGED),
    "directory's disk": (END + 6, "H", 1, DAMAGED),
    "entries on this disk": (END + 8, "H", 6, DAMAGED),
    "fewer entries": (END + 8, "HH", 6, DAMAGED),
    "more entries": (END + 8, "HH", 8, DAMAGED),
    "65,535 entries": (END + 8, "HH", 0xFFFF, "64 members"),
    "directory's size": (END + 12, "I", 463 - 8, DAMAGED),
    "directory of 4 GiB": (END + 12, "I", 0xFFFF_FFFF, "65536 bytes"),
    "directory behind the end": (END + 16, "I", 0xFFFF_FFFF, DAMAGED),
    "directory into the end": (END + 16, "I", END - 100, DAMAGED),
    "entry's signature": (DIRECTORY, "I", 0, DAMAGED),
    "local signature": (PLAIN.index(b"PK\x03\x04", 1), "I", 0, DAMAGED),
    "encrypted": (DIRECTORY + 8, "H", 0x0809, DAMAGED),
    "masked": (DIRECTORY + 8, "H", 0x2808, DAMAGED),
    "method deflate": (DIRECTORY + 10, "H", 8, "compressed"),
    "method unknown": (DIRECTORY + 10, "H", 99, "compressed"),
    "two sizes": (DIRECTORY + 20, "I", 10, DAMAGED),
    "size of 4 GiB": (DIRECTORY + 20, "II", 0xFFFF_FFFF, "outside of the file"),
    "size up to the directory": (DIRECTORY + 20, "II", DIRECTORY - 63, "outside of the file"),
    "size over the next": (DIRECTORY + 20, "II", 500, "overlap"),
    "name's length": (DIRECTORY + 28, "H", 0xFFFF, DAMAGED),
    "extra's length": (DIRECTORY + 30, "H", 0xFFFF, DAMAGED),
    "comment's length": (DIRECTORY + 32, "H", 0xFFFF, DAMAGED),
    "entry's disk": (DIRECTORY + 34, "H", 1, DAMAGED),
    "offset of 4 GiB": (DIRECTORY + 42, "I", 0xFFFF_FFFF, "outside of the file"),
    "offset before the directory": (DIRECTORY + 42, "I", DIRECTORY - 29, "outside of the file"),
    "offset elsewhere": (DIRECTORY + 42, "I", 1, DAMAGED),
    "local name": (30, "B", 0x41, DAMAGED),
    "local name's length": (26, "H", 15, DAMAGED),
    "local extra's length": (28, "H", 0xFFFF, DAMAGED),
}


@pytest.mark.parametrize("name", EDITS)
def test_damaged_zip_files_are_refused(name: str) -> None:
    at, form, value, match = EDITS[name]
    payload = PLAIN
    for letter in form:
        payload = files.patched(payload, at, letter, value)
        at += struct.calcsize(letter)
    refuse(payload, match)


def test_a_directory_that_reaches_into_the_end_record_is_refused() -> None:
    payload = files.zip_file(files.members(PLAIN).items())
    size = int.from_bytes(payload[-10:-6], "little")
    payload = files.patched(payload, payload.rindex(b"PK\x01\x02") + 32, "H", 22)  # the end record as a comment
    refuse(files.patched(payload, len(payload) - 10, "I", size + 22), DAMAGED)


def test_a_member_that_reaches_into_the_directory_is_refused() -> None:
    payload = files.zip_file([*files.members(PLAIN).items(), ("archive/last", b"1234")])
    entry = payload.rindex(b"PK\x01\x02")
    assert read(payload).num_rows == 3
    refuse(files.patched(files.patched(payload, entry + 20, "I", 5), entry + 24, "I", 5), "outside of the file")
