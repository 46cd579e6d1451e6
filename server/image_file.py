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

MAX_IMAGE_BYTES = 20 << 20
"""Of a file."""
MAX_PIXELS = 50_000_000
"""Width times height: 150 MB once decoded."""
MAX_SIDE = 32_768
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_DATA_URL = re.compile(r"data:(?:image/[a-z0-9.+-]{1,32})?((?:;[a-z0-9=._-]{1,64}){0,4}),", re.IGNORECASE)
_HEADER_CHARS = 512


class ImageError(ValueError):
    """The image can't be taken. The message says why; it is for the client."""


@dataclass(frozen=True, slots=True)
class ImageLimits:
    max_bytes: int = MAX_IMAGE_BYTES
    max_pixels: int = MAX_PIXELS


def read_data_url(url: str, limits: ImageLimits) -> bytes:
    """The file in a `data:` URL. Raises ImageError."""
    match = _DATA_URL.match(url[:_HEADER_CHARS])
    if match is None:
        raise ImageError("the data: URL must be of an image, as in data:image/png;base64,…")
    if not match[1].lower().endswith(";base64"):
        if len(url) > 3 * limits.max_bytes:
            raise ImageError(f"the image has more than {limits.max_bytes} bytes")
        return _checked(unquote_to_bytes(url[match.end() :]), limits)
    if len(url) - match.end() > (limits.max_bytes + 2) // 3 * 4:
        raise ImageError(f"the image has more than {limits.max_bytes} bytes")
    try:
        return _checked(pybase64.b64decode(url[match.end() :], validate=True), limits)
    except ValueError:
        raise ImageError("the data: URL is not valid base64") from None


def _checked(data: bytes, limits: ImageLimits) -> bytes:
    if len(data) > limits.max_bytes:
        raise ImageError(f"the image has more than {limits.max_bytes} bytes")
    return data


def decode_image(data: bytes, limits: ImageLimits) -> Image.Image:
    """A file's pixels as RGB, turned as its metadata says. Raises ImageError."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                width, height = image.size
                if width * height > limits.max_pixels or max(width, height) > MAX_SIDE:
                    raise ImageError(
                        f"the image has {width} x {height} pixels, more than {limits.max_pixels} or a side of {MAX_SIDE}"
                    )
                if min(width, height) < 1:
                    raise ImageError("the image is empty")
                image.load()
                turned = ImageOps.exif_transpose(image)
                return (image if turned is None else turned).convert("RGB")
        except ImageError:
            raise
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise ImageError(f"the image has more than {limits.max_pixels} pixels") from None
        except MemoryError:
            raise ImageError("the image is too large to be decoded") from None
        except Exception:
            # Decoders raise whatever a damaged file makes them trip over.
            raise ImageError("the image can't be read: PNG, JPEG, WebP and GIF are") from None
