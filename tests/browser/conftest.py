from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models import Family


@pytest.fixture(scope="session")
def llama(tiny_model: Callable[[Family], Path]) -> Path:
    return tiny_model("llama")
