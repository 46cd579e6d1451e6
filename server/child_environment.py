"""The environment variables of the processes that the server starts."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import runner.config

_SPIN_COUNT = "5000"
"""Some microseconds: as fast as the default on idle cores, and several times faster where something else runs."""


def environment() -> dict[str, str]:
    """Ours; and where the package is run from a checkout that is not installed, the way to it, since the children's
    Python does not look into the current folder."""
    environment = dict(os.environ)
    root = Path(runner.config.__file__).resolve().parent.parent
    if root != Path(sysconfig.get_path("purelib")).resolve():
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), environment.get("PYTHONPATH"))))
    if "OMP_WAIT_POLICY" not in environment:
        # torch's OpenMP threads otherwise spin for milliseconds at every barrier, on cores that the API processes need.
        environment.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
    return environment
