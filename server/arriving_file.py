"""A tensor file on its way: what has come of it is checked, cast, hashed and put where the runner reads it, while the
rest is still to come. Filled by `multipart`, `request_body` and `arriving_base64`, read by `inputs` and
`prompt_embeds`.

Files begin with a header that says where the values are (safetensors, .npy): once that is there, each piece of rows is
made as soon as its last byte has come, by a thread, or, a prompt's last one, at once. What is small, or has no such
header, or is not right, is gathered and judged as a whole by `embeddings`, at the end.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

from server.embeddings import decode_embedding, layout_of
from server.file_tensor import ITEM_BYTES, EmbeddingError, FileLayout, RowLimits
from server.pages import SMALL_BYTES, Gathered
from server.request_context import note_decoding
from server.row_memory import Run
from server.row_pieces import RowPieces, threads
from server.rows import Rows

_SMALL_RUN = 4096
"""A parser that finds something like a boundary everywhere gives a body out by a few bytes: these are put together."""

_AHEAD_PIECES = 8
"""So many have come, 8 MiB of a long body, and no thread has begun them: then the rest waits, in the client. What is
further ahead would take memory that has to be asked for, and be out of the cache when its turn comes."""

_Waiting = dict[int, tuple[RowPieces, list[Run]]]
"""The pieces that have come and that no thread has begun, by their number."""


class ArrivingFile:
    """`add` what comes, then `rows`; and `close`, whatever happens. On the event loop."""

    def __init__(self, hidden_size: int, dtype: str, max_rows: int, *, whole_digest: bool = False) -> None:
        """`hidden_size`, `dtype`: the model's. `max_rows`: of the largest embedding that can be meant. `whole_digest`:
        `rows` will be asked for their `sha256`."""
        self._limits, self._dtype = RowLimits(hidden_size, max_rows), dtype
        self._whole_digest = whole_digest
        self._gathered = Gathered()
        """All that came, until the values are made into rows as they come."""
        self._values: _ArrivingValues | None = None
        self._looked = False

    def add(self, chunk: bytes | memoryview) -> None:
        """`chunk`: not changed any more. Raises Unavailable where there is no memory."""
        if self._values is not None:
            self._values.add(memoryview(chunk))
            return
        self._gathered.add(chunk)
        if not self._looked and len(self._gathered) > SMALL_BYTES:  # more than any header has
            self._looked = True
            self._begin()

    async def keep_up(self) -> None:
        """Between two chunks: waits for the threads where they are far behind."""
        if self._values is not None:
            await self._values.keep_up()

    def _begin(self) -> None:
        head = self._gathered.view
        try:
            layout = layout_of(head, self._limits)
        except EmbeddingError:  # to be told at the end, when it is known which part of the prompt it is
            return
        if layout is not None and layout.num_rows * self._limits.hidden_size * ITEM_BYTES[self._dtype] > SMALL_BYTES:
            self._values = _ArrivingValues(layout, self._limits.hidden_size, self._dtype, self._whole_digest)
            self._values.add(head[layout.start :])
            self._gathered = Gathered()

    async def rows(self, max_rows: int) -> Rows:
        """Once, when all has come. Raises EmbeddingError (TooManyRows for more than `max_rows`), or Unavailable."""
        limits = self._limits
        values, self._values = self._values, None
        if values is None:
            payload, self._gathered = self._gathered.view, Gathered()
            return await asyncio.to_thread(
                decode_embedding, payload, hidden_size=limits.hidden_size, dtype=self._dtype, max_rows=max_rows
            )
        try:
            RowLimits(limits.hidden_size, max_rows).num_rows(values.shape)
            return await values.rows()
        except BaseException:  # the error's traceback leads to the values for as long as someone holds it
            values.close()
            raise

    def close(self) -> None:
        """Lets go of everything. What has been taken by `rows` is not of it any more."""
        self._gathered = Gathered()
        if self._values is not None:
            self._values.close()
            self._values = None


class _Turn:
    """One piece in each turn of the event loop: where many bodies end in the same one, streams wait for no more."""

    def __init__(self) -> None:
        self._taken_in: asyncio.AbstractEventLoop | None = None

    def take(self) -> bool:
        loop = asyncio.get_running_loop()
        if self._taken_in is loop:
            return False
        loop.call_soon(self._give)
        self._taken_in = loop
        return True

    def _give(self) -> None:
        self._taken_in = None


_turn = _Turn()


class _ArrivingValues:
    def __init__(self, layout: FileLayout, hidden_size: int, dtype: str, whole_digest: bool) -> None:
        self._waiting: _Waiting = {}
        self._layout = layout
        self.shape = (layout.num_rows, hidden_size)
        self._pieces = RowPieces(layout.num_rows, hidden_size, layout.dtype, dtype, whole_digest=whole_digest)
        self._is_urgent = not whole_digest
        """What is stored waits for no first token, and its digest is another millisecond."""
        self._size = layout.num_rows * self._pieces.source_bytes
        self._come = 0
        self._next = 0
        """The piece that is coming."""
        self._runs: list[Run] = []
        """What has come of it."""
        self._made: list[Future[None]] = []

    def __del__(self) -> None:
        # A request may be refused, or its client gone, long after its body was read: then nobody calls `close`.
        self.close()

    def add(self, chunk: memoryview) -> None:
        while chunk and self._come < self._size:
            _, end = self._pieces.span(self._next)
            run = chunk[: end - self._come]
            self._add_run(run)
            self._come += len(run)
            chunk = chunk[len(run) :]
            if self._come == end:
                self._make()
        self._come += len(chunk)  # more than was promised: counted, and no longer held

    def _add_run(self, run: memoryview) -> None:
        if len(run) >= _SMALL_RUN:
            self._runs.append(run)
        elif self._runs and isinstance(self._runs[-1], bytearray):
            self._runs[-1] += run
        else:
            self._runs.append(bytearray(run))

    def _make(self) -> None:
        runs, self._runs = self._runs, []
        # At the end nothing is left to receive meanwhile: it is sooner done than a thread has woken up.
        if self._come == self._size and self._is_urgent and _turn.take():
            self._pieces.make(self._next, runs)
        else:
            self._waiting[self._next] = self._pieces, runs
            self._made.append(threads().submit(_make_waiting, self._waiting, self._next))
        self._next += 1

    async def keep_up(self) -> None:
        if len(self._waiting) > _AHEAD_PIECES:
            await asyncio.wrap_future(self._made[-_AHEAD_PIECES // 2])

    async def rows(self) -> Rows:
        if self._come != self._size:
            raise EmbeddingError(self._layout.wrong_size(self._size, self._come))
        # Not before the end: each of them would wake the event loop, which has a body to receive.
        for each in self._made:
            if not each.done():
                await asyncio.wrap_future(each)
            each.result()
        note_decoding(self._pieces.seconds)
        return self._pieces.rows()

    def close(self) -> None:
        """Pieces that have not been begun are let go of and never made."""
        # Not by cancelling them: what is cancelled keeps its memory until a thread comes to it.
        self._waiting.clear()
        self._runs = []
        self._made = []


def _make_waiting(waiting: _Waiting, index: int) -> None:
    """In a thread. Refers to no more than `waiting` until it begins."""
    found = waiting.pop(index, None)
    if found is not None:
        pieces, runs = found
        pieces.make(index, runs)
