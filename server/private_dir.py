"""The folder of the unix sockets between server and runner: only this user may enter it, and it goes with the server.

A server that is killed with SIGKILL cannot remove its folder. So each folder holds a lock for as long as its server
lives, and the next server removes the folders whose lock is free.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "intarsia-"
_LOCK = "lock"
_MAX_PATH = 80
"""A unix socket's path has at most 107 bytes; the sockets' own names need some of them."""


class PrivateDir:
    """A locked folder with mode 0700. `remove` may be called twice."""

    def __init__(self) -> None:
        base = tempfile.gettempdir()
        if len(base) + len(_PREFIX) + 9 > _MAX_PATH:
            base = "/tmp"  # noqa: S108 - mkdtemp below makes a folder of our own in it
        _remove_abandoned(Path(base))
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
            self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if (self.path / _LOCK).exists():
                break
            os.close(self._lock)  # Another server took it for abandoned between the last two lines.

    def address(self, name: str) -> str:
        """The ZeroMQ address of the socket `name` in the folder."""
        return f"ipc://{self.path / name}"

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _remove_abandoned(base: Path) -> None:
    for path in base.glob(_PREFIX + "*"):
        with contextlib.suppress(OSError):
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
