"""Images as clients send them: what is read of them, and hostile ones, which cost little and are told why."""

from __future__ import annotations

import base64
import io
import random
import struct
import zlib
from typing import Any
from urllib.parse import unquote_to_bytes

import numpy as np
import pytest
from PIL import Image

from server.image_file import MAX_ASPECT, MAX_SCANS, ImageError, ImageLimits, decode_image, read_data_url
from server.long_strings import LongString
from tests.vision_models import picture

pytestmark = pytest.mark.filterwarnings(r"ignore:::PIL\.")  # as the module has it for the server

LIMITS = ImageLimits(max_bytes=1 << 20, max_pixels=1_000_000)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, data: bytes = b"", *more: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(more) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["PNG", "GIF", "WEBP", "JPEG"])
def test_formats(kind: str) -> None:
    image = picture(1)
    data = encoded(image, kind, **({"lossless": True} if kind == "WEBP" else {}))
    found = decode_image(data, LIMITS)
    assert (found.mode, found.size) == ("RGB", image.size)
    difference = np.abs(np.asarray(found, np.int16) - np.asarray(image, np.int16)).mean()
    assert difference < (12 if kind == "JPEG" else 0.01)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_frame(kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(picture(1), kind, save_all=True, append_images=[picture(2), picture(3)], **options)
    assert decode_image(data, LIMITS).tobytes() == picture(1).tobytes()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16", "CMYK"])
def test_all_modes_become_rgb(mode: str) -> None:
    data = encoded(Image.new(mode, (9, 5)), "JPEG" if mode == "CMYK" else "PNG")
    assert decode_image(data, LIMITS).mode == "RGB"


def test_it_is_turned_as_its_metadata_says() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    found = decode_image(encoded(picture(1, 50, 40), "PNG", exif=exif), LIMITS)
    assert found.tobytes() == picture(1, 50, 40).transpose(Image.Transpose.ROTATE_270).tobytes()


def test_damaged_metadata_is_no_reason_to_refuse_it() -> None:
    data = encoded(picture(1), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff\xff")
    assert decode_image(data, LIMITS).size == (50, 40)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "can't be read"),
        (b"\x89PNG\r\n\x1a\n", "can't be read"),
        (encoded(picture(1), "PNG")[:-200], "can't be read"),
        (encoded(picture(1), "JPEG")[:-200], "can't be read"),
        (encoded(picture(1), "BMP"), "can't be read"),
        (encoded(picture(1), "TIFF"), "can't be read"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "can't be read"),
        (b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>", "can't be read"),
        (png(2_000, 1_000), "2000 x 1000 pixels"),
        (png(2**31 - 1, 2**31 - 1), "pixels"),
        (png(40_000, 2), "40000 x 2 pixels"),
        (png(0, 4), "can't be read"),
        (png(4, 0), "can't be read"),
        (png(MAX_ASPECT * 3 + 1, 3), "200 times the other"),
        # A megabyte of text in a kilobyte, many times over.
        (png(4, 4, b"", *[chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 20)))] * 80), "can't be read"),
        (encoded(picture(1), "JPEG") + b"\xff\xda" * (MAX_SCANS + 1), "scans"),
    ],
)  # fmt: skip
def test_what_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ImageError, match=reason):
        decode_image(data, LIMITS)


def test_nothing_is_decoded_of_what_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    with pytest.raises(ImageError):
        decode_image(png(30_000, 30_000, zlib.compress(bytes(1 << 20))), ImageLimits())


def test_mutated_files_are_read_or_refused() -> None:
    rng = random.Random(0)
    files = [encoded(picture(1), kind) for kind in ("PNG", "JPEG", "GIF", "WEBP")]
    for _ in range(400):
        data = bytearray(rng.choice(files))
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        del data[rng.randrange(len(data) // 2, 2 * len(data)) :]
        try:
            found = decode_image(bytes(data), LIMITS)
        except ImageError:
            continue
        assert found.width * found.height <= LIMITS.max_pixels


# --- data: URLs -----------------------------------------------------------------------------------------------------


def as_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize(
    "header", ["data:image/png;base64,", "DATA:image/PNG;base64,", "data:;base64,", "data:image/svg+xml;x=y;base64,"]
)
def test_data_urls(header: str) -> None:
    data = random.Random(1).randbytes(900_001)
    assert read_data_url(header + as_base64(data), LIMITS) == data


@pytest.mark.parametrize("encoding", ["base64", "percent"])
def test_a_data_url_that_is_still_in_the_body(encoding: str) -> None:
    data = random.Random(1).randbytes(90_001)
    text = "data:image/png"
    text += ";base64," + as_base64(data) if encoding == "base64" else "," + "".join(f"%{byte:02x}" for byte in data)
    assert read_data_url(LongString.of(memoryview(text.encode())), LIMITS) == data
    with pytest.raises(ImageError, match="more than 1048576 bytes"):
        read_data_url(LongString.of(memoryview((text + "A" * 4_000_000).encode())), LIMITS)
    for wrong in (b"data:text/plain," + bytes(90_000), b"\xff" * 90_000):
        with pytest.raises(ImageError, match="must be of an image"):
            read_data_url(LongString.of(memoryview(wrong)), LIMITS)
    with pytest.raises(ImageError, match="not valid base64"):
        read_data_url(LongString.of(memoryview(b"data:image/png;base64," + b"\xff" * 90_000)), LIMITS)


def test_a_data_url_without_base64() -> None:
    assert read_data_url("data:image/png,%89PNG%0d", LIMITS) == b"\x89PNG\r"


@pytest.mark.parametrize("plain", [0, 1, 2, 3])
def test_escapes_across_the_borders_of_blocks(plain: int) -> None:
    data = random.Random(plain).randbytes(150_000)
    text = "a" * plain + "".join(f"%{byte:02X}" for byte in data)
    assert read_data_url("data:image/png," + text, LIMITS) == b"a" * plain + data
    assert read_data_url("data:image/png," + text + "%4", LIMITS) == unquote_to_bytes(text + "%4")


def test_a_large_data_url_must_be_base64() -> None:
    """Twenty million escapes took five gigabytes, and stopped every stream for six seconds."""
    url = "data:image/png," + "%41" * (3 << 20)
    with pytest.raises(ImageError, match="must be base64"):
        read_data_url(url, ImageLimits())


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:image/png;base64", "must be of an image"),
        ("data:text/html;base64,AAAA", "must be of an image"),
        ("data:image/" + "x" * 5000 + ";base64,AAAA", "must be of an image"),
        ("data:" + ";a" * 100_000, "must be of an image"),
        ("data:image/png;base64,AAA", "not valid base64"),
        ("data:image/png;base64,AA A", "not valid base64"),
        ("data:image/png;base64,AAAA\n", "not valid base64"),
        ("data:image/png;base64,é===", "not valid base64"),
        ("data:image/png;base64," + "A" * 1_400_000, "more than 1048576 bytes"),
        ("data:image/png;base64," + as_base64(bytes(LIMITS.max_bytes + 1)), "more than 1048576 bytes"),
        ("data:image/png," + "A" * 1_400_000, "more than 1048576 bytes"),
        ("data:image/png," + "A" * 4_000_000, "more than 1048576 bytes"),
    ],
)  # fmt: skip
def test_bad_data_urls(url: str, reason: str) -> None:
    with pytest.raises(ImageError, match=reason):
        read_data_url(url, LIMITS)
