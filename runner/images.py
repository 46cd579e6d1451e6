"""Images of a request that are still to be encoded, and the rows of those that were, kept for the next who shows them.

`runner.sequence` makes the first of a message's frames; `runner.image_encoder` fills and asks the second.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import prod

import numpy as np
from numpy.typing import NDArray

from runner.messages import DIGEST_BYTES, Span, VisionInfo


class InvalidImage(ValueError):
    """An image's frame isn't what this model takes."""


@dataclass(frozen=True)
class ImageInput:
    """One image of a request."""

    span: int
    """Which of the request's spans it becomes."""
    num_rows: int
    pixels: NDArray[np.float32]
    """What the image processor made of it, in the message's own memory."""
    grid: tuple[int, ...]
    digest: bytes
    """Of what it shows, and of the cache salt: equal ones become equal rows, and how soon they do tells nobody with
    another salt that this image was here."""


def image_inputs(
    spans: Sequence[Span], frames: Sequence[memoryview], digests: bytes, vision: VisionInfo | None, salt: bytes = b""
) -> list[ImageInput]:
    """A message's images.

    Args:
        frames: one a span. digests: of all rows. salt: the request's cache salt.

    Raises:
        InvalidImage
    """
    images, first = [], 0
    key = blake2b(salt, digest_size=32).digest()
    for index, (span, frame) in enumerate(zip(spans, frames, strict=True)):
        if span.pixels:
            if vision is None:
                raise InvalidImage("this model takes no images")
            if not _fits(span, frame, vision):
                raise InvalidImage("an image's frame doesn't have the size that the model takes")
            own = digests[first * DIGEST_BYTES : (first + span.length) * DIGEST_BYTES]
            pixels = np.frombuffer(frame, np.float32).reshape(span.pixels)
            digest = blake2b(own, key=key, digest_size=DIGEST_BYTES).digest()
            images.append(ImageInput(index, span.length, pixels, span.grid, digest))
        first += span.length
    return images


def _fits(span: Span, frame: memoryview, vision: VisionInfo) -> bool:
    if frame.nbytes != prod(span.pixels) * 4 or span.length > vision.max_rows:
        return False
    if not vision.mrope:
        return span.pixels == vision.pixel_shape and span.length == vision.image_rows and not span.grid
    if len(span.grid) != 3 or min(span.grid) < 1 or any(side % vision.merge_size for side in span.grid[1:]):
        return False
    patches = prod(span.grid)
    return span.pixels == (patches, vision.pixel_shape[1]) and span.length * vision.merge_size**2 == patches


class ImageRows:
    """The rows of images encoded lately, by digest: a bounded number of bytes of host memory, those asked for longest
    ago go first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rows: OrderedDict[bytes, NDArray[np.uint8]] = OrderedDict()
        self.num_bytes = 0

    def get(self, digest: bytes) -> NDArray[np.uint8] | None:
        rows = self._rows.get(digest)
        if rows is not None:
            self._rows.move_to_end(digest)
        return rows

    def put(self, digest: bytes, rows: NDArray[np.uint8]) -> None:
        if digest in self._rows or rows.nbytes > self._max_bytes:
            return
        self._rows[digest] = rows
        self.num_bytes += rows.nbytes
        while self.num_bytes > self._max_bytes:
            _, oldest = self._rows.popitem(last=False)
            self.num_bytes -= oldest.nbytes
