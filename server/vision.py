"""How the model's images become rows: the Hugging Face image processor, and the layout of an image in a prompt.

Loaded by `services` for models that see. Pixels are prepared here with Pillow and NumPy (there is no torch in this
process); the runner turns them into rows. An image stands in a prompt exactly as the model's own processor writes it:
`Layout` says which text goes before and behind its rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from runner.messages import DIGEST_BYTES, VisionInfo
from server.errors import ContextLengthExceeded, InvalidRequest, QueueFull
from server.image_fetch import ImageFetcher
from server.image_file import ImageError, ImageLimits, beginning, decode_image, read_data_url
from server.request_context import current_request
from server.segments import ImagePart
from server.tokenizer import Tokenizer
from server.turns import Turns

logger = logging.getLogger(__name__)

_THREADS = 2
"""An image takes up to half a gigabyte while it is prepared."""
_FETCHED_AT_ONCE = 32
"""Images by URL that are being fetched, or wait here to be prepared: each may be 20 MiB, for a request of no size."""
MAX_HELD_BYTES = 2 << 30
"""Of prepared images that the runner has not taken yet: a file of 40 kB may become 300 MB."""


@dataclass(frozen=True, slots=True)
class Layout:
    """An image in a prompt's text."""

    placeholder: str
    """What stands for it in a chat template, and in a text that the processor takes."""
    image_token: str
    """What the processor's text has at each of its rows."""
    before: str = ""
    after: str = ""


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """One image, prepared: a span of embedding rows that the runner makes."""

    pixels: npt.NDArray[np.float32] = field(repr=False)
    num_rows: int
    two_way: bool
    grid: tuple[int, ...]
    side: int
    """The longer side of `grid`, in rows: so many positions it takes, where rows have them in three dimensions."""
    merge_size: int
    digests: bytes = field(repr=False)
    """[num_rows, DIGEST_BYTES]: of what it shows, and the row's place in it."""


class Vision:
    def __init__(
        self,
        processor: Any,
        layout: Layout,
        info: VisionInfo,
        fetcher: ImageFetcher,
        limits: ImageLimits,
    ) -> None:
        """`processor`: an image processor of transformers that works without torch."""
        self.layout, self.info = layout, info
        self._processor, self._fetcher, self._limits = processor, fetcher, limits
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="image")
        self._preparing, self._fetching = Turns(_THREADS), Turns(_FETCHED_AT_ONCE)
        self.held = 0
        """Bytes of prepared images, until their requests let go of them."""
        # Takes the placeholder's place in the chat template (`image_template`), so that no text that a client writes
        # can be one. Never shown to anybody.
        self.marker = f"i{secrets.token_hex(16)}z"

    @classmethod
    def load(
        cls,
        folder: Path,
        info: VisionInfo,
        tokenizer: Tokenizer,
        allowed_domains: Sequence[str] = (),
        limits: ImageLimits | None = None,
    ) -> Vision | None:
        """None, with a word in the log, where the folder has no image processor that fits the model."""
        # By its module's name: by its own, transformers 5.17 demands torchvision before it has heard of the backend.
        from transformers.models.auto.image_processing_auto import AutoImageProcessor

        limits = limits or ImageLimits()
        try:
            processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
            vision = cls(
                processor,
                layout_of(info, tokenizer),
                info,
                ImageFetcher(allowed_domains, max_bytes=limits.max_bytes),
                limits,
            )
            vision.prepare(Image.new("RGB", (64, 64)), info.max_rows)
        except Exception as error:
            logger.warning("no images can be taken: the model's image processor is of no use (%s)", error)
            return None
        return vision

    @property
    def least_rows(self) -> int:
        """Of any image."""
        return max(self.info.image_rows, 1)

    async def load_image(self, part: ImagePart, max_rows: int) -> PreparedImage:
        """Raises InvalidRequest, ContextLengthExceeded for more than `max_rows`, or QueueFull. API keys take turns."""
        self._check_room(0)
        try:
            if beginning(part.url)[:5].lower() == "data:":
                image = await self._in_thread(lambda: self._from_data_url(part.url, max_rows))
            else:
                async with self._fetching.turn(_api_key()):
                    data = await self._fetcher.fetch(part.url)
                    image = await self._in_thread(lambda: self._from_file(data, max_rows))
        except TooManyImageRows as error:
            raise ContextLengthExceeded(f"{part.where}: {error}.", param=part.where) from None
        except ImageError as error:
            raise InvalidRequest(f"{part.where}: {error}.", param=part.where, code="invalid_image") from None
        self._hold(image.pixels.nbytes)
        return image

    async def _in_thread(self, prepare: Callable[[], PreparedImage]) -> PreparedImage:
        await self._preparing.enter(_api_key())
        loop = asyncio.get_running_loop()

        def over(_: Future[PreparedImage]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._preparing.leave)

        # Who stops waiting for it does not stop the thread: others get their turn when that is free.
        try:
            work = self._threads.submit(prepare)
        except BaseException:
            self._preparing.leave()
            raise
        work.add_done_callback(over)
        return await asyncio.wrap_future(work)

    def _check_room(self, nbytes: int) -> None:
        if self.held and self.held + nbytes > MAX_HELD_BYTES:
            raise QueueFull("Too many images are on their way to the engine.")

    def _hold(self, nbytes: int) -> None:
        """Until the request that is being answered lets go of its body and what was made of it, or is over."""
        context = current_request.get()
        if context is None:
            return
        self._check_room(nbytes)
        self.held += nbytes
        held, release_body = [nbytes], context.release_body

        def let_go() -> None:
            while held:
                self.held -= held.pop()

        def release() -> None:
            release_body()
            let_go()

        context.release_body = release
        context.on_end.append(let_go)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _from_data_url(self, url: str, max_rows: int) -> PreparedImage:
        return self._from_file(read_data_url(url, self._limits), max_rows)

    def _from_file(self, data: bytes, max_rows: int) -> PreparedImage:
        return self.prepare(decode_image(data, self._limits), max_rows)

    def prepare(self, image: Image.Image, max_rows: int) -> PreparedImage:
        """What the image processor makes of an image. Raises ImageError."""
        info, max_rows = self.info, min(max_rows, self.info.max_rows)
        if info.image_rows > max_rows:
            raise TooManyImageRows(info.image_rows, max_rows)
        try:
            if info.mrope and (rows := self._rows_of(image)) > max_rows:
                raise TooManyImageRows(rows, max_rows)
            made = self._processor(images=[image], return_tensors="np")
        except ImageError:
            raise
        except ValueError:
            raise ImageError("the image has a shape that this model does not take") from None
        pixels = np.ascontiguousarray(made["pixel_values"], dtype=np.float32)
        grid = tuple(int(side) for side in made["image_grid_thw"][0]) if info.mrope else ()
        rows = int(np.prod(grid)) // info.merge_size**2 if info.mrope else info.image_rows
        if pixels.shape != (info.pixel_shape if not info.mrope else (int(np.prod(grid)), info.pixel_shape[1])):
            raise ImageError("the image became something that the model does not take")
        side = max(grid[1:]) // info.merge_size if grid else rows
        return PreparedImage(pixels, rows, info.two_way, grid, side, info.merge_size, _row_digests(pixels, grid, rows))

    def _rows_of(self, image: Image.Image) -> int:
        """Without preparing it: an image may be meant to become a thousand rows or a hundred thousand."""
        count = self._processor.get_number_of_image_patches(image.height, image.width)
        return int(count) // self.info.merge_size**2


class TooManyImageRows(ImageError):
    def __init__(self, rows: int, max_rows: int) -> None:
        super().__init__(f"the image takes {rows} tokens, and there is room for {max(max_rows, 0)}")


def _api_key() -> int | None:
    context = current_request.get()
    return None if context is None else context.api_key


def layout_of(info: VisionInfo, tokenizer: Tokenizer) -> Layout:
    """As the family's processor in transformers has it."""
    image_token = tokenizer.names([info.image_token_id])[0]
    if not image_token:
        raise ValueError("the tokenizer has no token for images")
    if info.family != "gemma3":
        return Layout(image_token, image_token)
    begin, end = (str(getattr(tokenizer.transformers, name)) for name in ("boi_token", "eoi_token"))
    return Layout(begin, image_token, f"\n\n{begin}", f"{end}\n\n")


def _row_digests(pixels: npt.NDArray[np.float32], grid: tuple[int, ...], rows: int) -> bytes:
    shown = blake2b(repr((pixels.shape, grid)).encode(), digest_size=DIGEST_BYTES)
    shown.update(pixels.data.cast("B"))
    whole = shown.digest()
    return b"".join(blake2b(whole + row.to_bytes(4), digest_size=DIGEST_BYTES).digest() for row in range(rows))
