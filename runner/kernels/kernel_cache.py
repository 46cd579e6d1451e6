"""Where the CPU's kernels are kept once they are compiled.

Used by `kernels._numba` before any kernel is declared, and when one is kept. The folder's name holds a digest of the
kernels' sources and of what compiles them for which machine, so what is found in it was made of these very files.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import llvmlite.binding
import numba

from runner.default_model import DefaultModelError, cache_folder

_UNUSED_SECONDS = 30 * 24 * 3600
"""After so long without a start, the kernels of another version or machine are removed."""
_NAME = re.compile("[0-9a-f]{16}")


def use_cache() -> bool:
    """Tells Numba of the folder: `$NUMBA_CACHE_DIR`, or `kernels` beside the converted models. False where it can't be
    written: kernels are then compiled at every start."""
    folder = _folder()
    if folder is None:
        return False
    numba.config.CACHE_DIR = str(folder)
    return True


@contextlib.contextmanager
def one_writer() -> Iterator[None]:
    """While a kernel is written to the folder, no other process writes one. Numba reads what there is of the kernel,
    one entry a dtype, adds its own and writes all: where two do that at once, one's entry may come to stand beside the
    other's code, for good."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # not every file system has locks
            fcntl.flock(stack.enter_context(open(Path(numba.config.CACHE_DIR) / "lock", "wb")), fcntl.LOCK_EX)
        yield


def _folder() -> Path | None:
    configured = os.environ.get("NUMBA_CACHE_DIR")
    try:
        folder = (Path(configured) if configured else cache_folder() / "kernels") / _digest()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # What lies in it is code: it has to be our own.
        is_ours = folder.stat().st_uid == os.geteuid() and os.access(folder, os.W_OK | os.X_OK)
    except (OSError, DefaultModelError):
        return None
    if not is_ours:
        return None
    os.utime(folder)
    if not configured:  # in a folder of the operator's choice nothing is ours to remove
        _remove_unused(folder.parent)
    return folder


def _remove_unused(parent: Path) -> None:
    with contextlib.suppress(OSError):
        for folder in parent.iterdir():
            used = folder.lstat().st_mtime
            if _NAME.fullmatch(folder.name) and time.time() - used > _UNUSED_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)  # follows no link


def _digest() -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name in ("numba", "llvmlite"):
        digest.update(metadata.version(name).encode())
    machine = llvmlite.binding.get_host_cpu_name(), llvmlite.binding.get_host_cpu_features().flatten()
    for part in (*machine, numba.config.CPU_NAME, numba.config.CPU_FEATURES):
        digest.update(str(part).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()
