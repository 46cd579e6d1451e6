"""Tensor files that come in pieces of any size are the rows that they are as a whole, and are refused alike."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import io
import random
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest
import safetensors.torch
import torch

from server import arriving_file
from server.arriving_file import ArrivingFile
from server.embeddings import EmbeddingError, decode_embedding
from server.errors import Unavailable
from server.file_tensor import ITEM_BYTES, TooManyRows
from server.pages import Pages
from server.row_pieces import RowPieces, WholeDigest, threads
from server.rows import Rows
from tests.server import embedding_files as files
from tests.server.embedding_files import TORCH_DTYPES, cut

HIDDEN = 1000
"""A row is no power of two, and not a whole number of words of the cache."""
ROWS = 1200
"""2.4 or 4.8 MB."""


def arrive(chunks: Sequence[bytes], target: str = "bfloat16", max_rows: int = ROWS, hidden: int = HIDDEN) -> Rows:
    async def run() -> Rows:
        file = ArrivingFile(hidden, target, ROWS)
        for chunk in chunks:
            file.add(chunk)
        return await file.rows(max_rows)

    return asyncio.run(run())


def npy(tensor: torch.Tensor) -> bytes:
    file = io.BytesIO()
    np.save(file, tensor.numpy())
    return file.getvalue()


@pytest.mark.parametrize("source", TORCH_DTYPES)
@pytest.mark.parametrize("target", TORCH_DTYPES)
def test_the_rows_are_torchs(source: str, target: str) -> None:
    tensor = files.rows(ROWS, HIDDEN, dtype=source)
    payload = safetensors.torch.save({"rows": tensor}, {"a": "b" * 5})
    expected = files.raw(tensor.to(TORCH_DTYPES[target]))
    for chunks in (cut(payload, 262_144), cut(payload, 70_001, 3, 65_536), [payload]):
        found = arrive(chunks, target)
        assert found.data == expected
        assert (found.num_rows, found.hidden_size, found.dtype) == (ROWS, HIDDEN, target)
        assert found.digests == files.digests(expected, len(expected) // ROWS)
        assert found == decode_embedding(payload, hidden_size=HIDDEN, dtype=target, max_rows=ROWS)


def test_other_formats() -> None:
    tensor = files.rows(ROWS, HIDDEN)
    for payload in (npy(tensor), files.torch_file(tensor)):
        assert arrive(cut(payload, 100_000), "float32").data == files.raw(tensor)


def test_a_small_one() -> None:
    tensor = files.rows(3, HIDDEN)
    assert arrive(cut(safetensors.torch.save({"a": tensor}), 100), "float32").data == files.raw(tensor)


def test_by_single_bytes() -> None:
    """What a parser finds in a body that looks like its boundary everywhere: nothing is kept for each byte."""
    tensor = files.rows(400, HIDDEN, dtype="bfloat16")
    payload = safetensors.torch.save({"a": tensor})
    assert arrive([*cut(payload[:400_000], 1), *cut(payload[400_000:], 1, 5000)]).data == files.raw(tensor)
    file = ArrivingFile(HIDDEN, "bfloat16", ROWS)
    file.add(payload[:300_000])
    for at in range(300_000, 301_000):
        file.add(payload[at : at + 1])
    assert file._values is not None and len(file._values._runs) == 2


@pytest.mark.parametrize("row", [0, 700, ROWS - 1])
def test_the_first_row_that_is_not_finite_is_named(row: int) -> None:
    tensor = files.rows(ROWS, HIDDEN, dtype="bfloat16")
    tensor[row, 17] = tensor[-1, 3] = float("nan")
    payload = safetensors.torch.save({"a": tensor})
    with pytest.raises(EmbeddingError, match=f"^row {row} of the prompt embedding contains NaN"):
        arrive(cut(payload, 100_000))


def wrong() -> dict[str, bytes]:
    payload = safetensors.torch.save({"a": files.rows(ROWS, HIDDEN, dtype="bfloat16")})
    size = int.from_bytes(payload[:8], "little")
    return {
        "cut": payload[:-1],
        "cut in the first piece": payload[:500_000],
        "longer": payload + b"x",
        "much longer": payload + bytes(700_000),
        "two tensors": safetensors.torch.save({"a": torch.zeros(ROWS, 500), "b": torch.zeros(ROWS, 500)}),
        "another width": safetensors.torch.save({"a": torch.zeros(ROWS, HIDDEN + 1)}),
        "too many rows": safetensors.torch.save({"a": torch.zeros(ROWS + 1, HIDDEN)}),
        "a header without end": (1 << 40).to_bytes(8, "little") + payload[8:],
        "a long header": (100_000).to_bytes(8, "little") + payload[8:],
        "no JSON": payload[:8] + b"{" + random.Random(0).randbytes(size - 1) + payload[8 + size :],
        "nothing": random.Random(0).randbytes(1 << 20),
        "a pickle": b"\x80" + bytes(1 << 20),
    }


@pytest.mark.parametrize("kind", wrong())
def test_it_is_refused_as_a_whole_one_is(kind: str) -> None:
    payload = wrong()[kind]
    with pytest.raises(EmbeddingError) as expected:
        decode_embedding(payload, hidden_size=HIDDEN, dtype="bfloat16", max_rows=ROWS)
    with pytest.raises(EmbeddingError) as found:
        arrive(cut(payload, 99_999))
    assert str(found.value) == str(expected.value)
    assert type(found.value) is type(expected.value)


def test_more_rows_than_the_prompt_has_room_for() -> None:
    payload = safetensors.torch.save({"a": files.rows(ROWS, HIDDEN, dtype="bfloat16")})
    with pytest.raises(TooManyRows, match=f"{ROWS} rows; at most {ROWS - 1}"):
        arrive(cut(payload, 99_999), max_rows=ROWS - 1)


def test_one_that_is_given_up_leaves_nothing_to_do() -> None:
    async def run() -> None:
        for size in (100, 700_000, 2_000_000):
            file = ArrivingFile(HIDDEN, "bfloat16", ROWS)
            file.add(payload[:size])
            file.close()
            file.close()

    payload = safetensors.torch.save({"a": files.rows(ROWS, HIDDEN, dtype="bfloat16")})
    asyncio.run(run())
    assert arrive([payload]).num_rows == ROWS  # the threads are there for others


@pytest.fixture
def busy() -> Iterator[Callable[[], None]]:
    """All threads that make rows are; call it to let them go on and to wait until nothing is queued."""
    release, count = threading.Event(), threads()._max_workers
    begun, together = threading.Barrier(count + 1), threading.Barrier(count)

    def block() -> None:
        begun.wait(30)
        release.wait(60)

    blocking = [threads().submit(block) for _ in range(count)]
    begun.wait(30)

    def go_on() -> None:
        release.set()
        wait(blocking, 30)
        wait([threads().submit(together.wait, 30) for _ in range(count)], 30)  # each has nothing else to do

    yield go_on
    go_on()


async def drop(file: ArrivingFile) -> BaseException | None:
    """What becomes of a request that is refused for another reason, or whose client is gone."""
    return None


async def too_many(file: ArrivingFile) -> BaseException | None:
    with pytest.raises(TooManyRows) as caught:
        await file.rows(ROWS - 1)
    return caught.value


async def wrong_size(file: ArrivingFile) -> BaseException | None:
    file.add(b"x")
    with pytest.raises(EmbeddingError) as caught:
        await file.rows(ROWS)
    return caught.value


async def client_gone(file: ArrivingFile) -> BaseException | None:
    task = asyncio.ensure_future(file.rows(ROWS))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    return caught.value


@pytest.mark.parametrize("refuse", [drop, too_many, wrong_size, client_gone])
def test_what_is_refused_later_is_not_made(
    refuse: Callable[[ArrivingFile], Awaitable[BaseException | None]],
    busy: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its pieces but the last are queued; their memory is gone while the threads are still busy and the error is
    held."""
    made: list[int] = []
    errors: list[BaseException | None] = []
    monkeypatch.setattr(RowPieces, "make", lambda self, index, values: made.append(index))

    async def run() -> list[weakref.ref[Pages]]:
        file = ArrivingFile(HIDDEN, "bfloat16", ROWS)
        held = []
        for chunk in cut(payload, 300_000):
            pages = Pages(len(chunk))
            pages[:] = chunk
            file.add(memoryview(pages))
            held.append(weakref.ref(pages))
        del pages
        assert sum(each() is not None for each in held) > 5
        errors.append(await refuse(file))
        return held

    monkeypatch.setattr(Pages, "__del__", lambda self: None)  # the thread that gives them back holds them for a moment
    payload = safetensors.torch.save({"a": files.rows(ROWS, HIDDEN, dtype="bfloat16")})
    assert [each() for each in asyncio.run(run())] == [None] * 9
    busy()
    assert made == [4]


def made_by(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """Filled with the thread of every piece that is made."""
    found: list[threading.Thread] = []
    make = RowPieces.make

    def note(self: RowPieces, index: int, values: Sequence[memoryview | bytearray]) -> None:
        found.append(threading.current_thread())
        make(self, index, values)

    monkeypatch.setattr(RowPieces, "make", note)
    return found


def test_bodies_that_end_together_do_not_hold_up_the_loop_together(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = files.rows(200, HIDDEN, dtype="bfloat16")  # one piece
    payload, threads_of = safetensors.torch.save({"a": tensor}), made_by(monkeypatch)

    async def run() -> None:
        for count in (5, 1):
            arriving = [ArrivingFile(HIDDEN, "bfloat16", ROWS) for _ in range(count)]
            for file in arriving:
                file.add(payload)
            assert [(await file.rows(ROWS)).data for file in arriving] == [files.raw(tensor)] * count
            on_loop = [thread is threading.current_thread() for thread in threads_of]
            assert sum(on_loop) == 1 and len(on_loop) == count
            threads_of.clear()
            await asyncio.sleep(0)  # where the threads were as quick, nothing had to wait: it is the same turn yet

    asyncio.run(run())


def test_what_is_stored_is_made_by_threads_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for its first token, and the loop would hash the last piece twice."""
    payload, threads_of = safetensors.torch.save({"a": files.rows(ROWS, HIDDEN)}), made_by(monkeypatch)

    async def run() -> None:
        file = ArrivingFile(HIDDEN, "bfloat16", ROWS, whole_digest=True)
        file.add(payload)
        await file.rows(ROWS)
        assert len(threads_of) > 3 and threading.current_thread() not in threads_of

    asyncio.run(run())


@pytest.mark.parametrize(("source", "target"), [("bfloat16", "float32"), ("float32", "bfloat16")])
@pytest.mark.parametrize("hidden", [64, 1000, 1024, 16_384])
def test_a_piece_is_a_megabyte_at_most(source: str, target: str, hidden: int) -> None:
    """Before and after the cast: the event loop makes the last one."""
    rows = (64 << 20) // (4 * hidden)
    pieces = RowPieces(rows, hidden, source, target)
    start, end = pieces.span(0)
    assert 1 << 19 <= (end - start) * (4 // ITEM_BYTES[source]) <= 1 << 20
    assert pieces.span(pieces.count - 1)[1] == rows * hidden * ITEM_BYTES[source]


@pytest.mark.parametrize(
    ("of", "error"),
    [
        ("os.pwritev", OSError(28, "No space left on device")),
        ("server.row_pieces.cast_rows", MemoryError()),
    ],
)
def test_without_memory(monkeypatch: pytest.MonkeyPatch, of: str, error: Exception) -> None:
    def refuse(*args: object, **kwargs: object) -> int:
        raise error

    monkeypatch.setattr(of, refuse)
    payload = safetensors.torch.save({"a": files.rows(ROWS, HIDDEN, dtype="bfloat16")})
    with pytest.raises(Exception, match="no memory for these rows") as caught:
        arrive(cut(payload, 99_999))
    assert getattr(caught.value, "status", 0) == 503


@pytest.mark.parametrize("of", ["server.row_memory.SharedView", "server.row_memory.allocate"])
def test_without_mappings(monkeypatch: pytest.MonkeyPatch, of: str) -> None:
    """To read what was written takes a descriptor more; without any, there is only ordinary memory to be had."""

    def refuse(*args: object) -> int:
        raise OSError(24, "Too many open files")

    if of.endswith("allocate"):
        monkeypatch.setattr("os.memfd_create", refuse)
    monkeypatch.setattr(of, refuse)
    payload = safetensors.torch.save({"a": files.rows(ROWS, HIDDEN, dtype="bfloat16")})
    with pytest.raises(Unavailable, match="no memory for these rows"):
        arrive(cut(payload, 99_999))
    with pytest.raises(Unavailable, match="no memory for these rows"):
        decode_embedding(payload, hidden_size=HIDDEN, dtype="bfloat16", max_rows=ROWS)


def test_an_error_in_a_piece_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the piece was done long before the end of the file."""

    def fail(self: RowPieces, index: int, values: object) -> None:
        if not index:
            raise ZeroDivisionError

    async def run() -> None:
        file = ArrivingFile(HIDDEN, "bfloat16", ROWS)
        file.add(payload)
        assert file._values is not None
        wait(file._values._made, 30)
        await file.rows(ROWS)

    monkeypatch.setattr(RowPieces, "make", fail)
    payload = safetensors.torch.save({"a": files.rows(ROWS, HIDDEN, dtype="bfloat16")})
    with pytest.raises(ZeroDivisionError):
        asyncio.run(run())


@pytest.mark.parametrize("target", ["bfloat16", "float32"])
def test_memory_that_the_system_does_not_take_back(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """The rows are right all the same."""

    def refuse(self: Pages, start: int, end: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(Pages, "give_back_part", refuse)
    tensor = files.rows(ROWS, HIDDEN, dtype="bfloat16")
    payload = safetensors.torch.save({"a": tensor})
    pages = Pages(len(payload))
    pages[:] = payload

    async def run() -> Rows:
        file = ArrivingFile(HIDDEN, target, ROWS)
        file.add(memoryview(pages))
        return await file.rows(ROWS)

    assert asyncio.run(run()).data == files.raw(tensor.to(TORCH_DTYPES[target]))


def test_without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.memfd_create")
    tensor = files.rows(ROWS, HIDDEN)
    found = arrive(cut(safetensors.torch.save({"a": tensor}), 99_999), "float16")
    assert found.shared is None
    assert found.data == files.raw(tensor.half())


def test_a_body_waits_for_threads_that_are_behind(busy: Callable[[], None]) -> None:
    """What has come and is not begun is bounded, whatever the body's size; and none of it is lost."""
    count, size = 20, 1 << 20
    payload = safetensors.torch.save({"a": files.rows(count * 512, 1024, dtype="bfloat16")})

    async def run() -> Rows:
        file = ArrivingFile(1024, "bfloat16", count * 512)
        received = 0

        async def receive() -> None:
            nonlocal received
            for chunk in cut(payload, 1 << 18):
                file.add(chunk)
                received += len(chunk)
                await file.keep_up()

        receiving = asyncio.ensure_future(receive())
        async with asyncio.timeout(20):
            while received <= arriving_file._AHEAD_PIECES * size:  # noqa: ASYNC110 - nothing sets an event
                await asyncio.sleep(0.001)
        await asyncio.wait([receiving], timeout=0.1)
        assert not receiving.done()
        assert arriving_file._AHEAD_PIECES * size < received <= (arriving_file._AHEAD_PIECES + 2) * size
        busy()
        await receiving
        return await file.rows(count * 512)

    assert bytes(asyncio.run(run()).data) == payload[-count * size :]


@pytest.mark.parametrize("source", ["bfloat16", "float32"])
def test_the_digest_of_all_rows(source: str, busy: Callable[[], None]) -> None:
    """Made with the pieces, in whichever order they are."""
    tensor = files.rows(ROWS, HIDDEN, dtype=source)
    expected = hashlib.sha256(files.raw(tensor.to(torch.bfloat16))).hexdigest()
    pieces = RowPieces(ROWS, HIDDEN, source, "bfloat16", whole_digest=True)
    raw = memoryview(files.raw(tensor))
    for index in random.Random(3).sample(range(pieces.count), pieces.count):
        start, end = pieces.span(index)
        pieces.make(index, [raw[start:end]])
    assert pieces.rows().sha256 == expected
    busy()
    payload = safetensors.torch.save({"a": tensor})

    async def run() -> Rows:
        file = ArrivingFile(HIDDEN, "bfloat16", ROWS, whole_digest=True)
        file.add(payload)
        return await file.rows(ROWS)

    assert asyncio.run(run()).sha256 == expected


@pytest.mark.parametrize("whole_digest", [True, False])
def test_its_memory_goes_without_the_collector(whole_digest: bool) -> None:
    gc.disable()
    try:
        pieces = RowPieces(ROWS, HIDDEN, "float32", "float32", whole_digest=whole_digest)
        memory = weakref.ref(pieces._memory)
        del pieces
        assert memory() is None
    finally:
        gc.enable()


def test_many_threads_make_one_digest() -> None:
    data = random.Random(4).randbytes(64 * 1000)
    digest = WholeDigest()

    def read(index: int) -> memoryview:
        return memoryview(data)[index * 1000 : (index + 1) * 1000]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda index: digest.add(index, read(index), read), range(63, -1, -1)))
    assert digest.hexdigest() == hashlib.sha256(data).hexdigest()


def test_of_threads_one_hashes_and_no_other_waits_for_it() -> None:
    entered, release, hashed = threading.Event(), threading.Event(), list[bytes]()

    class Slow:
        def update(self, rows: memoryview) -> None:
            entered.set()
            release.wait(20)
            hashed.append(bytes(rows))

    digest = WholeDigest()
    digest._hash = Slow()  # type: ignore[assignment]
    pieces = [memoryview(b"first"), memoryview(b"second")]
    thread = threading.Thread(target=digest.add, args=(0, pieces[0], pieces.__getitem__))
    thread.start()
    assert entered.wait(30)
    digest.add(1, pieces[1], pieces.__getitem__)
    assert hashed == []
    release.set()
    thread.join(30)
    assert hashed == [b"first", b"second"]
