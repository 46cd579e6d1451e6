"""Fixtures of the load generator's tests."""

from __future__ import annotations

import pytest

from tests.server.harness import free_port


@pytest.fixture
def unused_port() -> int:
    return free_port()
