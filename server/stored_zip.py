"""The members of a zip file whose members are not compressed, as `torch.save` writes it. Called by `torch_file`.

Not `zipfile`: it reads a directory of any length, follows comments, zip64 records and prefixed data, lets the last of
two members with one name win, and copies what it reads. Here every member is a view of the payload, and a file of which
two readers could disagree is refused.
"""

from __future__ import annotations

import struct
from itertools import pairwise

from server.file_tensor import EmbeddingError

MAGIC = b"PK\x03\x04"
MAX_MEMBERS = 64
"""`torch.save` writes seven for one tensor."""
MAX_DIRECTORY_BYTES = 64 * 1024

_END = struct.Struct("<4s4H2LH")  # signature, disk, directory's disk, entries on it, entries, size, offset, comment
_ENTRY = struct.Struct("<4s6H3L5H2L")  # one of the central directory; its name follows
_LOCAL = struct.Struct("<4s5H3L2H")  # before each member's name and bytes
_ALLOWED_FLAGS = 0x0808  # sizes follow the data; names are UTF-8. Not: encrypted, patched, masked.
_STORED = 0
_DAMAGED = "the zip file is damaged"


def read_stored_zip(payload: memoryview) -> dict[bytes, memoryview]:
    """Every member's bytes by its name, as views of `payload`. Raises EmbeddingError.

    CRCs are not checked: they cost more than all other checks together, torch lets people switch them off
    (`set_crc32_options`), and the transport has its own.
    """
    body, directory, count = _split(payload)
    members: dict[bytes, memoryview] = {}
    extents: list[tuple[int, int]] = []
    at = 0
    for _ in range(count):
        if len(directory) - at < _ENTRY.size:
            raise EmbeddingError(_DAMAGED)
        fields = _ENTRY.unpack_from(directory, at)
        signature, _, _, flags, method, _, _, _, packed, size, name_length, extra, comment, disk, _, _, offset = fields
        name = bytes(directory[at + _ENTRY.size : at + _ENTRY.size + name_length])
        at += _ENTRY.size + name_length + extra + comment
        if signature != b"PK\x01\x02" or disk != 0:
            raise EmbeddingError(_DAMAGED)
        if method != _STORED:
            raise EmbeddingError("the zip file's members are compressed: send it as torch.save writes it, uncompressed")
        if packed != size or flags & ~_ALLOWED_FLAGS:
            raise EmbeddingError(_DAMAGED)
        if name in members:
            raise EmbeddingError("the zip file has two members of the same name")
        start = _data_start(body, offset, name)
        if size > len(body) - start:
            raise EmbeddingError("a member of the zip file lies outside of the file")
        members[name] = body[start : start + size]
        extents.append((offset, start + size))
    if at != len(directory):
        raise EmbeddingError(_DAMAGED)
    extents.sort()
    if any(start < end for (_, end), (start, _) in pairwise(extents)):
        raise EmbeddingError("members of the zip file overlap")
    return members


def _split(payload: memoryview) -> tuple[memoryview, memoryview, int]:
    """What stands before the central directory, the directory, and its number of entries. The end record must be the
    file's last bytes: one place to look means one meaning. (torch writes zip64 records too, which say the same.)"""
    end = len(payload) - _END.size
    if end < 0:
        raise EmbeddingError("the zip file is cut short")
    signature, disk, directory_disk, here, count, size, offset, comment = _END.unpack_from(payload, end)
    if signature != b"PK\x05\x06" or comment:
        raise EmbeddingError("the zip file is cut short, or something follows its directory")
    if count > MAX_MEMBERS or size > MAX_DIRECTORY_BYTES:
        raise EmbeddingError(f"the zip file's directory is over {MAX_MEMBERS} members or {MAX_DIRECTORY_BYTES} bytes")
    if disk or directory_disk or here != count or offset + size > end:
        raise EmbeddingError(_DAMAGED)
    return payload[:offset], payload[offset : offset + size], count


def _data_start(body: memoryview, offset: int, name: bytes) -> int:
    """Where the member's bytes start: its local header is as long as that header says (torch pads it to align them)."""
    if offset > len(body) - _LOCAL.size:
        raise EmbeddingError("a member of the zip file lies outside of the file")
    signature, *_, name_length, extra = _LOCAL.unpack_from(body, offset)
    start: int = offset + _LOCAL.size + name_length + extra
    name_start = offset + _LOCAL.size
    if signature != MAGIC or start > len(body) or body[name_start : name_start + name_length] != name:
        raise EmbeddingError(_DAMAGED)
    return start
