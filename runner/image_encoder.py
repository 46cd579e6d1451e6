"""Requests whose images are still to be encoded. They wait here, in front of the scheduler, which sees only rows.

Driven by the engine, once a step: at most one image is encoded between two steps, so that no sequence that decodes
waits for more than one. The rows go to the host, for a preempted request is computed again, and a copy of them is kept
for the next request with the same image.
"""

from __future__ import annotations

from collections import deque
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
        self._waiting: deque[Request] = deque()
        self._encoding: _Encoding | None = None
        self.rows = ImageRows(cache_bytes)
        self.encoded = 0
        """Images, since start: those that were found among the rows kept don't count."""

    def __bool__(self) -> bool:
        """Whether there is something to do."""
        return bool(self._waiting) or self._encoding is not None

    @property
    def keys(self) -> list[Key]:
        """Of the requests that wait."""
        return [request.key for request in self._waiting]

    @property
    def num_sequences(self) -> int:
        return sum(request.n - len(request.unwanted) for request in self._waiting)

    def add(self, request: Request) -> None:
        """A request with images. It comes out of `advance`."""
        self._waiting.append(request)

    def get(self, key: Key) -> Request | None:
        """The request, if it waits here."""
        return next((request for request in self._waiting if request.key == key), None)

    def remove(self, request: Request) -> None:
        self._waiting.remove(request)

    def advance(self) -> list[Request]:
        """Takes in the image that was being encoded, begins with the next one, and returns the requests that have all
        their rows. Waits for at most one image."""
        if self._encoding is not None:
            self._finish(self._encoding)
            self._encoding = None
        ready = []
        while self._waiting:
            request = self._waiting[0]
            image = self._next_unknown(request)
            if image is not None:
                self._encoding = self._begin(request, image)
                break
            ready.append(self._waiting.popleft())
        return ready

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
