"""Requests whose images are still to be encoded. They wait here, in front of the scheduler, which sees only rows.

Driven by the engine, once a step: at most one image is encoded between two steps, so that no sequence that decodes
waits for more than one. As in the scheduler's queue lower priorities go first, and among equal ones clients take turns.
The rows go to the host, for a preempted request is computed again, and a copy of them is kept for the next request with
the same image.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from runner.images import ImageInput, ImageRows
from runner.sequence import Key, Request
from runner.stream import Event, Stream
from runner.vision import Vision

CACHE_BYTES = 256 << 20


@dataclass
class _Encoding:
    request: Request
    image: ImageInput
    done: Event
    rows: list[Tensor]
    """The rows, on the host, once `done` has been waited for."""


class ImageEncoder:
    def __init__(self, vision: Vision, stream: Stream, cache_bytes: int = CACHE_BYTES) -> None:
        self._vision, self._stream = vision, stream
        self._waiting: dict[int, deque[Request]] = {}
        """By client, whose turn it is first. Each by priority, then as they came."""
        self._encoding: _Encoding | None = None
        self.rows = ImageRows(cache_bytes)
        self.encoded = 0
        """Images, since start: those that were found among the rows kept don't count."""

    def __bool__(self) -> bool:
        """Whether there is something to do."""
        return bool(self._waiting) or self._encoding is not None

    def __iter__(self) -> Iterator[Request]:
        """The requests that wait."""
        return itertools.chain.from_iterable(self._waiting.values())

    @property
    def keys(self) -> list[Key]:
        return [request.key for request in self]

    @property
    def num_sequences(self) -> int:
        return sum(request.n - len(request.unwanted) for request in self)

    def add(self, request: Request) -> None:
        """A request with images. It comes out of `advance`."""
        insort(self._waiting.setdefault(request.client, deque()), request, key=_priority)

    def get(self, key: Key) -> Request | None:
        """The request, if it waits here."""
        return next((request for request in self if request.key == key), None)

    def remove(self, request: Request) -> None:
        self._waiting[request.client].remove(request)
        if not self._waiting[request.client]:
            del self._waiting[request.client]

    def advance(self) -> list[Request]:
        """Takes in the image that was being encoded, begins with the next one, and returns the requests that have all
        their rows. Waits for at most one image."""
        if self._encoding is not None:
            self._finish(self._encoding)
            self._encoding = None
        ready: list[Request] = []
        lacking: dict[int, ImageInput] = {}
        for client, queue in list(self._waiting.items()):
            image = self._take_ready(queue, ready)
            if image is None:
                del self._waiting[client]
            else:
                lacking[client] = image
        if lacking:
            client = min(lacking, key=lambda each: _priority(self._waiting[each][0]))  # of equals the first
            self._encoding = self._begin(self._waiting[client][0], lacking[client])
            self._waiting[client] = self._waiting.pop(client)  # the others' turn
        return ready

    def _take_ready(self, queue: deque[Request], ready: list[Request]) -> ImageInput | None:
        """Moves those at the queue's head that have all their rows; returns the image that the next one lacks, if there
        is a next one."""
        while queue:
            image = self._next_unknown(queue[0])
            if image is not None:
                return image
            ready.append(queue.popleft())
        return None

    def _next_unknown(self, request: Request) -> ImageInput | None:
        """The first image whose rows have to be made; those before it get the rows that are kept."""
        while request.images:
            image = request.images[0]
            rows = self.rows.get(image.digest)
            if rows is None:
                return image
            request.set_rows(image.span, rows)
            del request.images[0]
        return None

    def _begin(self, request: Request, image: ImageInput) -> _Encoding:
        rows: list[Tensor] = []
        pixels = torch.from_numpy(image.pixels.copy())  # the message's own memory can't be written to

        def encode() -> None:
            made = self._vision.encode(pixels, image.grid)
            host = torch.empty(made.shape, dtype=made.dtype, pin_memory=made.is_cuda)
            rows.append(host.copy_(made, non_blocking=True))

        self._stream.run(encode)
        self.encoded += 1
        return _Encoding(request, image, self._stream.record(), rows)

    def _finish(self, encoding: _Encoding) -> None:
        encoding.done.wait()
        (made,) = encoding.rows
        rows = made.reshape(len(made), -1).view(torch.uint8).numpy()
        if len(rows) != encoding.image.num_rows:
            raise RuntimeError(f"an image became {len(rows)} rows in place of {encoding.image.num_rows}")
        self.rows.put(encoding.image.digest, rows)
        images = encoding.request.images
        if images and images[0] is encoding.image:  # else it was aborted
            encoding.request.set_rows(encoding.image.span, rows)
            del images[0]


def _priority(request: Request) -> int:
    return request.priority
