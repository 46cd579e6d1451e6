"""Images as clients send them: `data:` URLs and files' bytes, decoded to pixels. Called from a thread, never on the
event loop.

What arrives is hostile until proven otherwise. Only PNG, JPEG, WebP and GIF are read, by Pillow's own decoders; what a
header says of the size is compared with the limits before anything is decoded, so that a few bytes can't become
gigabytes; of an animation the first frame is taken. No message quotes content and nothing is logged.
"""

from __future__ import annotations

import io
import re
import warnings
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

import pybase64
from PIL import Image, ImageOps

from server.long_strings import LongString
from server.pages import give_turn

# Pillow tells standard error of damaged metadata, and of sizes that are refused here anyway. (Not around each call:
# what is ignored is ignored in all threads.)
warnings.filterwarnings("ignore", module=r"PIL\.")

MAX_IMAGE_BYTES = 20 << 20
"""Of a file."""
MAX_PIXELS = 50_000_000
"""Width times height: 150 MB once decoded."""
MAX_SIDE = 32_768
MAX_ASPECT = 200
"""Longer side by shorter one: some processors enlarge the shorter one, whatever becomes of the longer."""
MAX_SCANS = 100
"""Of a JPEG: each costs as much as decoding a plain one. A progressive one has about ten."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_DATA_URL = re.compile(r"data:(?:image/[a-z0-9.+-]{1,32})?((?:;[a-z0-9=._-]{1,64}){0,4}),", re.IGNORECASE)
_HEADER_CHARS = 512
_BASE64_BLOCK = 1 << 20
"""Characters that are decoded at once, while which no other thread runs. A multiple of 4."""
_MAX_ESCAPED_CHARS = 4 << 20
"""Of a URL that is not base64: decoding takes a hundred times as long as base64, and who means well sends that."""
_ESCAPED_BLOCK = 64 << 10
"""Characters: each third may become an object of its own meanwhile."""


class ImageError(ValueError):
    """The image can't be taken. The message says why; it is for the client."""


@dataclass(frozen=True, slots=True)
class ImageLimits:
    max_bytes: int = MAX_IMAGE_BYTES
    max_pixels: int = MAX_PIXELS


def beginning(url: str) -> str:
    """The first few hundred characters of a URL, which may be a `LongString`."""
    return str(url.data[:_HEADER_CHARS], "utf-8", "replace") if isinstance(url, LongString) else url[:_HEADER_CHARS]


def read_data_url(url: str, limits: ImageLimits) -> bytes:
    """The file in a `data:` URL. Raises ImageError."""
    match = _DATA_URL.match(beginning(url))
    if match is None:
        raise ImageError("the data: URL must be of an image, as in data:image/png;base64,…")
    data = url.data if isinstance(url, LongString) else url
    if not match[1].lower().endswith(";base64"):
        if len(data) > 3 * limits.max_bytes:
            raise ImageError(f"the image has more than {limits.max_bytes} bytes")
        if len(data) > _MAX_ESCAPED_CHARS:
            raise ImageError(f"a data: URL of more than {_MAX_ESCAPED_CHARS} characters must be base64")
        rest = data[match.end() :]
        return _checked(_unescaped(rest.encode() if isinstance(rest, str) else bytes(rest)), limits)
    if len(data) - match.end() > (limits.max_bytes + 2) // 3 * 4:
        raise ImageError(f"the image has more than {limits.max_bytes} bytes")
    blocks: list[bytes] = []
    try:
        for start in range(match.end(), len(data), _BASE64_BLOCK):
            blocks.append(pybase64.b64decode(data[start : start + _BASE64_BLOCK], validate=True))
            give_turn()
    except ValueError:
        raise ImageError("the data: URL is not valid base64") from None
    return _checked(b"".join(blocks), limits)


def _unescaped(text: bytes) -> bytes:
    """Percent-encoding undone, block by block, none of which ends inside of an escape."""
    blocks, start = [], 0
    while start < len(text):
        end = start + _ESCAPED_BLOCK
        cut = text.find(b"%", end - 2, end)
        end = cut if cut >= 0 else end
        blocks.append(unquote_to_bytes(text[start:end]))
        start = end
        give_turn()
    return b"".join(blocks)


def _checked(data: bytes, limits: ImageLimits) -> bytes:
    if len(data) > limits.max_bytes:
        raise ImageError(f"the image has more than {limits.max_bytes} bytes")
    return data


def decode_image(data: bytes, limits: ImageLimits) -> Image.Image:
    """A file's pixels as RGB, turned as its metadata says. Raises ImageError."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check_size(image, limits)
            if image.format == "JPEG" and data.count(b"\xff\xda") > MAX_SCANS:
                raise ImageError(f"the image has more than {MAX_SCANS} scans")
            image.load()
            return _turned(image).convert("RGB")
    except ImageError:
        raise
    except Image.DecompressionBombError:
        raise ImageError(f"the image has more than {limits.max_pixels} pixels") from None
    except Exception:
        # Decoders raise whatever a damaged file makes them trip over.
        raise ImageError("the image can't be read: PNG, JPEG, WebP and GIF are") from None


def _check_size(image: Image.Image, limits: ImageLimits) -> None:
    """As the header has it: nothing is decoded yet."""
    width, height = image.size
    if min(width, height) < 1:
        raise ImageError("the image is empty")
    if width * height > limits.max_pixels or max(width, height) > MAX_SIDE:
        raise ImageError(f"the image has {width} x {height} pixels: at most {limits.max_pixels}, {MAX_SIDE} a side")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise ImageError(f"one side of the image is more than {MAX_ASPECT} times the other")


def _turned(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # metadata that can't be read says nothing of how to turn it
        return image
