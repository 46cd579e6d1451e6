"""Embedding rows copied by several threads where they are many: a prompt's first step waits for them, and the device
with it. Called by `staging`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from runner.cores import usable_cores

_THREADS = 4
_PART_BYTES = 640 * 1024
"""What is less is copied before another thread has woken up."""


def copy_rows(target: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
    """target, source: [n, bytes of a row]. Returns when all are there."""
    parts = min(usable_cores() // 2, _THREADS, source.nbytes // _PART_BYTES)
    if parts < 2:
        target[:] = source
        return
    first, *others = pairwise(len(source) * part // parts for part in range(parts + 1))
    pool = _pool()
    try:
        # Numpy copies without the interpreter's lock.
        copies = [pool.submit(target[start:end].__setitem__, slice(None), source[start:end]) for start, end in others]
    except RuntimeError:  # no thread can be started
        pool.shutdown(cancel_futures=True)  # what is queued would be copied later, when these buffers hold other rows
        _pool.cache_clear()
        target[:] = source
        return
    target[slice(*first)] = source[slice(*first)]
    for copy in copies:
        copy.result()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS - 1, thread_name_prefix="copies")
