"""Chat requests with random images: words and, before them, PNG files as `data:` URLs.

An image is noise in two colours, which are drawn for it: it is made in microseconds, the server has all of its pixels
to decode, and no two are alike, so that nothing that was encoded before is found.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pybase64

from server.bench.workloads import Common, Prepared, RandomText, Workload, chat_request


@dataclass(frozen=True)
class RandomImages:
    """`text`: where the words come from. `count`: images of a request, each `side` x `side` pixels."""

    common: Common
    text: RandomText
    count: int
    side: int
    seed: int = 0

    def prepare(self, index: int) -> Prepared:
        colours = np.random.default_rng((self.seed, 7, index)).integers(0, 256, (self.count, 6), np.uint8)
        content: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": self._url(each.tobytes())}} for each in colours
        ]
        content.append({"type": "text", "text": self.text.words(index)})
        prepared = chat_request(self.common, [{"role": "user", "content": content}], self.common.output_len)
        return replace(prepared, kind="images")

    def others(self, offset: int) -> Workload:
        text = replace(self.text, seed=self.text.seed + offset)
        return replace(self, text=text, seed=self.seed + offset)

    def _url(self, palette: bytes) -> str:
        before, behind = self._pieces
        return "data:image/png;base64," + pybase64.b64encode(before + _chunk(b"PLTE", palette) + behind).decode()

    @cached_property
    def _pieces(self) -> tuple[bytes, bytes]:
        """The file before its palette, and behind it: one bit a pixel, the same noise in all."""
        header = struct.pack(">IIBBBBB", self.side, self.side, 1, 3, 0, 0, 0)
        bits = np.random.default_rng(0).integers(0, 256, (self.side, -(-self.side // 8) + 1), np.uint8)
        bits[:, 0] = 0  # each line begins with its filter: none
        data = zlib.compress(bits.tobytes(), 1)
        before = b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header)
        return before, _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
