"""How the C library keeps what was freed. Called once a process, by `worker`."""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 16 << 20
_MAPPED_BYTES = 1 << 20
_GIVEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_freed_memory() -> None:
    """A body comes in pieces of 256 KiB, each in memory of its own. glibc gives such memory back to the system as soon
    as half a megabyte is free, to ask for it again for the next piece: four microseconds for each page, a fifth of what
    receiving costs. So it keeps some megabytes. It would keep up to 64 MiB by itself, or next to nothing: that depends
    on what was freed before.

    Does nothing where the operator has chosen, or with another C library."""
    if not any(name in os.environ for name in _GIVEN):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
            mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
