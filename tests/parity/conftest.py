"""What the parity tests share: engines by their settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models import Family
from tests.parity.shelf import EngineShelf


@pytest.fixture(scope="session")
def shelf(tiny_model: Callable[[Family], Path]) -> EngineShelf:
    return EngineShelf(tiny_model)
