"""How many cores there are for this process. Asked by what starts threads of its own: `grammar` and `row_copies`."""

from __future__ import annotations

import os
from functools import cache


@cache
def usable_cores() -> int:
    """Those that this process may run on: a container has often a few of the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
