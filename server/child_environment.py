"""The environment variables of the processes that the server starts."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import runner.config


def environment() -> dict[str, str]:
    """Ours; and where the package is run from a checkout that is not installed, the way to it, since the children's
    Python does not look into the current folder."""
    environment = dict(os.environ)
    root = Path(runner.config.__file__).resolve().parent.parent
    if root != Path(sysconfig.get_path("purelib")).resolve():
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), environment.get("PYTHONPATH"))))
    return environment
