"""How many objects and lists are in a JSON text, told before it is parsed. Used by `body` for large ones.

A parser holds the interpreter's lock from the first byte to the last. Text and numbers cost it some milliseconds a
megabyte; a megabyte of empty lists is 350,000 objects, which take a tenth of a second to make and to collect, for every
stream of the process. No request has so many that means something.
"""

from __future__ import annotations

from server.pages import give_turn

MAX_NODES = 1 << 17
"""Objects and lists. More than the longest input of `/v1/responses` may have: 16,384 items with two lists each, and
65,536 parts."""
_PIECE_BYTES = 256 * 1024
"""Looked at without giving other threads a turn: 3 ms at worst."""


def has_too_many_nodes(data: bytes | memoryview, limit: int = MAX_NODES) -> bool:
    """Of JSON; of other text it says anything. For threads."""
    return _brackets(data) > limit and count_nodes(data) > limit


def _brackets(data: bytes | memoryview) -> int:
    """Those in strings too, of which a text may have any number; so this alone refuses nothing."""
    count = 0
    for start in range(0, len(data), _PIECE_BYTES):
        piece = bytes(data[start : start + _PIECE_BYTES])
        count += piece.count(b"{") + piece.count(b"[")
    return count


def count_nodes(data: bytes | memoryview) -> int:
    """Opening brackets outside of strings. A string ends at a quotation mark that is not escaped."""
    count = 0
    in_string = False
    cut = b""
    for start in range(0, len(data), _PIECE_BYTES):
        piece = cut + bytes(data[start : start + _PIECE_BYTES])
        # A backslash whose character is in the next piece belongs there. (An even number of them are pairs.)
        cut = piece[len(piece) - (len(piece) - len(piece.rstrip(b"\\"))) % 2 :]
        piece = piece[: len(piece) - len(cut)].replace(rb"\\", b"").replace(rb"\"", b"")
        parts = piece.split(b'"')
        outside = b"".join(parts[in_string::2])
        count += outside.count(b"{") + outside.count(b"[")
        in_string ^= len(parts) % 2 == 0
        give_turn()
    return count
